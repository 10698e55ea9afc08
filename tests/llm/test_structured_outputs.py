"""Structured output through a real engine process: streams, several answers, stop strings, refusals."""

import asyncio
import json

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.llm.engines import answer, collect, fake_llm

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"enum": [36, 85]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def wanting(constraint: dict, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=300, structured_outputs=StructuredOutputsParams(**constraint), **fields)  # type: ignore[arg-type]


async def test_deltas_join_to_json_and_free_streams_run_beside_it() -> None:
    async with fake_llm(max_num_seqs=8) as llm:
        bound = collect(llm.generate("who?", wanting({"json": PERSON}, output_kind=RequestOutputKind.DELTA, n=3)))
        free = collect(llm.generate("a prompt", SamplingParams(max_tokens=40)))
        outputs, plain = await asyncio.gather(bound, free)
    texts = ["", "", ""]
    for output in outputs:
        for one in output.outputs:
            texts[one.index] += one.text
    assert all(json.loads(text)["name"] in ("Ada", "Grace") for text in texts)
    assert all(one.finish_reason == "stop" for one in outputs[-1].outputs)
    assert plain[-1].text == answer("a prompt", 40)


async def test_a_stop_string_ends_it_before_the_grammar_does() -> None:
    async with fake_llm() as llm:
        outputs = await collect(llm.generate("who?", wanting({"json": PERSON}, stop=['"age"'])))
        whole = await collect(llm.generate("who?", wanting({"json": PERSON})))
    ended = outputs[-1].outputs[0]
    assert ended.stop_reason == '"age"' and whole[-1].text.startswith(ended.text) and '"name"' in ended.text


async def test_a_bad_schema_tells_its_reason_and_hurts_nobody() -> None:
    async with fake_llm() as llm:
        streams = [
            collect(llm.generate("a", wanting({"json": {"type": "integer", "minimum": 5, "maximum": 3}}))),
            collect(llm.generate("b", wanting({"regex": "[a-c]{4}"}))),
            collect(llm.generate("c", SamplingParams(max_tokens=8))),
        ]
        broken, bound, free = await asyncio.gather(*streams)
        assert broken[-1].outputs[0].finish_reason == "error"
        assert broken[-1].outputs[0].stop_reason == (
            "structured_outputs.json cannot be used: Unsatisfiable schema: minimum (5) is greater than maximum (3)."
        )
        assert len(bound[-1].text) == 4 and free[-1].text == answer("c", 8)


async def test_an_abort_while_the_grammar_is_compiled() -> None:
    many = {f"p{number}": {"type": "string", "maxLength": number + 1} for number in range(1500)}
    async with fake_llm() as llm:
        stream = llm.generate("a", wanting({"json": {"type": "object", "properties": many}}), "slow")
        task = asyncio.ensure_future(collect(stream))
        async with asyncio.timeout(30):
            while not llm.num_unfinished_requests:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            await llm.abort("slow")
            outputs = await task
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert (await collect(llm.generate("c", SamplingParams(max_tokens=8))))[-1].text == answer("c", 8)


async def test_what_cannot_be_meant_is_refused_before_it_is_sent() -> None:
    llm: AsyncLLM
    async with fake_llm() as llm:
        with pytest.raises(InvalidRequestError, match="never fetched"):
            await collect(llm.generate("a", wanting({"json": {"$ref": "https://example.org/schema.json"}})))
        assert llm.num_unfinished_requests == 0
