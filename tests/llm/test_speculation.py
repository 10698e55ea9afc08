"""Speculation as a user sees it: outputs of several tokens at a time say what single tokens say, ends included."""

import asyncio
from typing import Any

import pytest

from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import collect, fake_llm

PROMPTS = ["one", "two two", "three"]
PARAMS: list[dict[str, Any]] = [
    {},
    {"stop": ["cbb", "bab", "acb"], "min_tokens": 23},
    {"stop": ["bbaac", "cacbccc", "bbbcb"], "include_stop_str_in_output": True},
    {"stop": ["bbbb", "b"], "min_tokens": 17},
    {"logprobs": 1},
    {"stop_token_ids": [ord("c")], "min_tokens": 20},
]


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


async def answers(
    speculative: dict[str, Any] | None, output_kind: RequestOutputKind
) -> tuple[list[list[RequestOutput]], float]:
    async with fake_llm("letters=3", speculative=speculative) as llm:
        streams = [
            llm.generate(prompt, SamplingParams(max_tokens=70, output_kind=output_kind, **params))
            for prompt in PROMPTS
            for params in PARAMS
        ]
        found = [await collect(stream) for stream in streams]
        drafts = (await llm.get_stats())["spec_decoding_stats"]
        return found, 0.0 if drafts is None else drafts["num_accepted_tokens"] / drafts["num_draft_tokens"]


def told(outputs: list[RequestOutput]) -> dict[str, Any]:
    """The whole answer, put together from what was streamed."""
    parts = [output.outputs[0] for output in outputs]
    return {
        "text": "".join(part.text for part in parts),
        "token_ids": [token_id for part in parts for token_id in part.token_ids],
        "logprobs": [list(position) for part in parts for position in part.logprobs or []],
        "finish_reason": parts[-1].finish_reason,
        "stop_reason": parts[-1].stop_reason,
    }


@pytest.mark.parametrize("output_kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_texts_ends_and_logprobs_are_those_without_drafts(output_kind: RequestOutputKind) -> None:
    (drafted, acceptance), (plain, none) = await asyncio.gather(answers(NGRAM, output_kind), answers(None, output_kind))
    assert [told(outputs) for outputs in drafted] == [told(outputs) for outputs in plain]
    assert acceptance > 0.5 and none == 0
    assert {told(outputs)["stop_reason"] for outputs in plain} >= {"cbb", "bab", "bbaac", "b", ord("c"), None}
