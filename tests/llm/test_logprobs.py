"""Logprobs as users get them: samples and prompts, by id, with ranks and text."""

from collections.abc import Sequence

import numpy as np
import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError
from llmkernel.llm.input_processor import InputProcessor
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.llm.logprobs import Logprob
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.prompts import TokenizedPrompt
from llmkernel.protocol.outputs import EngineCoreOutput, FinishReason, LogprobsLists
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import FAKE, fake_llm
from tests.llm.outputs_of_an_engine import fake_tokenizer, ready_response, request


def lists(rows: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[int]) -> LogprobsLists:
    return LogprobsLists(
        np.array([[token for token, _ in row] for row in rows], np.int32),
        np.array([[value for _, value in row] for row in rows], np.float32),
        np.array(ranks, np.int32),
    )


def run(
    params: SamplingParams, outputs: Sequence[EngineCoreOutput], prompt: Sequence[int] = (65,)
) -> list[RequestOutput]:
    processor = OutputProcessor(fake_tokenizer(), log_stats=False)
    processor.add_request(request("r-1", params, prompt), "a prompt")
    return [made for output in outputs for made in processor.process_outputs([output]).request_outputs]


def steps(**first: object) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput("r-1", [66], **first),  # type: ignore[arg-type]
        EngineCoreOutput("r-1", [67]),
        EngineCoreOutput("r-1", [68], finish_reason=FinishReason.LENGTH),
    ]


PROMPT = [72, 0xC3, 0xA4]  # "H", then the two bytes of "ä"
PROMPT_LISTS = lists([[(0xC3, -1.5), (104, -0.5)], [(0xA4, -0.25), (0xA4, -0.25)]], [2, 1])


def plain(found: list[dict[int, Logprob] | None] | None) -> list:
    """Logprob, rank and text of each entry."""
    assert found is not None
    return [
        entries and {token: (one.logprob, one.rank, one.decoded_token) for token, one in entries.items()}
        for entries in found
    ]


def check_prompt(found: list[dict[int, Logprob] | None] | None) -> None:
    first, second = {0xC3: (-1.5, 2, ""), 104: (-0.5, 1, "h")}, {0xA4: (-0.25, 1, "ä")}
    assert plain(found) == [None, first, second]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_begin_with_none_and_come_as_the_kind_says(kind: RequestOutputKind) -> None:
    params = SamplingParams(prompt_logprobs=1, max_tokens=9, output_kind=kind)
    outputs = run(params, steps(new_prompt_logprobs_tensors=PROMPT_LISTS), PROMPT)
    told = [output.prompt_logprobs for output in outputs]
    if kind is RequestOutputKind.DELTA:
        check_prompt(told.pop(0))
        assert told == [None, None]
    else:
        assert len(told) == (1 if kind is RequestOutputKind.FINAL_ONLY else 3)
        for one in told:
            check_prompt(one)
    assert outputs[-1].outputs[0].logprobs is None and outputs[-1].outputs[0].cumulative_logprob is None


def test_deltas_that_are_joined_keep_them() -> None:
    params = SamplingParams(prompt_logprobs=1, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    first, second, third = run(params, steps(new_prompt_logprobs_tensors=PROMPT_LISTS), PROMPT)
    first.add(second, aggregate=True)
    first.add(third, aggregate=True)
    check_prompt(first.prompt_logprobs)
    assert first.outputs[0].text == "BCD"


def test_a_prompt_of_one_token_has_none_alone() -> None:
    empty = LogprobsLists(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), np.zeros(0, np.int32))
    outputs = run(SamplingParams(prompt_logprobs=1), steps(new_prompt_logprobs_tensors=empty))
    assert outputs[0].prompt_logprobs == [None]


def test_the_whole_vocabulary_is_ranked_and_named_ids_are_not() -> None:
    everything = lists([[(66, -0.5), *enumerate([-3.0, -0.5, -2.0, -9.0])]], [2])
    outputs = run(SamplingParams(logprobs=-1), steps(new_logprobs=everything))
    logprobs = outputs[0].outputs[0].logprobs
    assert logprobs is not None
    assert {token: entry.rank for token, entry in logprobs[0].items()} == {66: 2, 0: 3, 1: 1, 2: 2, 3: 4}
    named = lists([[(66, -0.5), (97, -4.0), (66, -0.5)]], [1])
    outputs = run(SamplingParams(logprob_token_ids=[97, 66]), steps(new_logprobs=named))
    assert plain(outputs[0].outputs[0].logprobs) == [{66: (-0.5, 1, "B"), 97: (-4.0, None, "a")}]
    assert outputs[0].outputs[0].cumulative_logprob == -0.5


async def test_through_a_whole_engine_in_chunks_beside_a_warm_cache() -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    async with fake_llm("max_model_len=400", max_num_batched_tokens=32) as llm:
        for _ in range(2):
            params = SamplingParams(prompt_logprobs=2, max_tokens=3, n=2, seed=1)
            outputs = [output async for output in llm.generate(prompt, params)]
            found = outputs[-1].prompt_logprobs
            assert found is not None and found[0] is None and outputs[-1].num_cached_tokens == 0
            for letter, entries in zip(prompt[1:], found[1:], strict=True):
                first, second = entries.values()  # the fake model's best alternative is the token itself
                assert (first.decoded_token, first.rank, first.logprob) == (letter, 1, -0.5)
                assert (second.rank, second.logprob) == (2, -1.5)


def test_the_largest_demand_is_refused_and_small_ones_pass() -> None:
    processor = InputProcessor(EngineArgs(), ready_response(model_vocab_size=50_000), fake_tokenizer())
    params = SamplingParams(prompt_logprobs=-1)
    processor.process_inputs("r", TokenizedPrompt(None, [1] * 40), params)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs = -1 means 2050000 entries"):
        processor.process_inputs("r", TokenizedPrompt(None, [1] * 41), params)
    with pytest.raises(InvalidRequestError, match="logprob_token_ids holds 50000"):
        processor.process_inputs("r", TokenizedPrompt(None, [1]), SamplingParams(logprob_token_ids=[50_000]))


def test_structured_outputs_need_a_tokenizer_and_work_in_one_process() -> None:
    from llmkernel.protocol.sampling_params import StructuredOutputsParams

    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["left", "right"]))
    processor = InputProcessor(EngineArgs(), ready_response(), None)
    with pytest.raises(InvalidRequestError, match="structured_outputs needs a tokenizer"):
        processor.process_inputs("r", TokenizedPrompt(None, [1]), params)
    with LLMEngine(EngineArgs(model="fake:"), executor_class=FAKE, multiprocess_mode=False) as engine:
        engine.add_request("s", "Which way?", params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert outputs[-1].outputs[0].text in ("left", "right") and outputs[-1].outputs[0].finish_reason == "stop"
