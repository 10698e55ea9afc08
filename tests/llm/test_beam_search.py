"""Beam search against an exhaustive one, on a language of a few tokens whose probabilities are known."""

import asyncio
import itertools
import math

import numpy as np
import pytest

from llmkernel.errors import InvalidRequestError, RequestFailedError, UnsupportedFeatureError
from llmkernel.llm.beam_search import BeamSearch
from llmkernel.llm.llm import LLM
from llmkernel.llm.logprobs import Logprob
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.prompts import TokenizedPrompt
from llmkernel.protocol.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.llm.engines import FAKE, fake_llm
from tests.llm.outputs_of_an_engine import ready_response

LETTERS = (97, 98, 99, 258)
"""a, b, c and the end token."""


def logprobs_after(token_ids: list[int]) -> dict[int, float]:
    """A distribution that depends on all that came before."""
    rng = np.random.default_rng(token_ids)
    weights = rng.dirichlet(np.ones(len(LETTERS)))
    return {token: math.log(weight) for token, weight in zip(LETTERS, weights, strict=True)}


def answer(token_ids: list[int], count: int) -> RequestOutput:
    best = sorted(logprobs_after(token_ids).items(), key=lambda item: -item[1])[:count]
    entries = {token: Logprob(value, rank) for rank, (token, value) in enumerate(best, 1)}
    return RequestOutput("r", None, token_ids, outputs=[CompletionOutput(0, "", [best[0][0]], logprobs=[entries])])


def search(prompt: list[int], params: BeamSearchParams) -> BeamSearch:
    beams = BeamSearch(TokenizedPrompt(None, prompt), params, ready_response())
    while prompts := beams.prompts:
        count = beams.sampling_params.logprobs
        assert count is not None and len(prompts) <= params.beam_width
        beams.advance([answer(beam["prompt_token_ids"], count) for beam in prompts])
    return beams


def every_sequence(prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """All texts up to this length, the end token where it ends one, and their cumulative logprobs."""
    found = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(LETTERS, repeat=size):
            ended = tokens[-1] == 258
            if 258 in tokens[:-1] or (size < length and not ended):
                continue
            found[tokens] = sum(logprobs_after([*prompt, *tokens[:at]])[token] for at, token in enumerate(tokens))
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_wide_beam_finds_what_an_exhaustive_search_finds(start: int, length_penalty: float) -> None:
    prompt, width, length = [start, 5], 10, 3
    params = BeamSearchParams(
        beam_width=width, max_tokens=length, length_penalty=length_penalty, include_stop_str_in_output=True
    )
    found = search(prompt, params).sequences(None)

    def score(tokens: tuple[int, ...], logprob: float) -> float:
        return logprob / (len(prompt) + len(tokens) - (tokens[-1] == 258)) ** length_penalty

    scores = sorted((score(*item) for item in every_sequence(prompt, length).items()), reverse=True)
    mine = [score(tuple(beam.tokens[2:]), beam.cum_logprob) for beam in found]
    assert mine == sorted(mine, reverse=True) and mine[0] == pytest.approx(scores[0])
    exact = every_sequence(prompt, length)
    for beam in found:
        tokens = tuple(beam.tokens[2:])
        assert beam.cum_logprob == pytest.approx(exact[tokens])
        assert len(beam.logprobs) == len(tokens)
        assert (beam.finish_reason, beam.stop_reason) == (("stop", 258) if tokens[-1] == 258 else ("length", None))


def test_the_end_token_is_left_out_or_ignored_as_asked() -> None:
    plain = search([1], BeamSearchParams(beam_width=4, max_tokens=3)).sequences(None)
    assert any(beam.finish_reason == "stop" for beam in plain)
    assert not any(258 in beam.tokens for beam in plain)
    ignoring = search([1], BeamSearchParams(beam_width=4, max_tokens=3, ignore_eos=True)).sequences(None)
    assert {len(beam.tokens) for beam in ignoring} == {4} and len(ignoring) == 4


def test_a_beam_that_fails_ends_the_search_with_its_reason() -> None:
    beams = BeamSearch(TokenizedPrompt(None, [1]), BeamSearchParams(beam_width=2, max_tokens=3), ready_response())
    failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason="out of luck")
    with pytest.raises(RequestFailedError, match="out of luck"):
        beams.advance([RequestOutput("r", None, [1], outputs=[failed], finished=True)])


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 0},
        {"beam_width": 11},
        {"max_tokens": 0},
        {"temperature": 3},
        {"length_penalty": "x"},
        {"ignore_eos": 1},
    ],
    ids=str,
)
def test_wrong_parameters_are_named(fields: dict) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | fields)


def test_what_is_not_built_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a"))


async def test_async_and_blocking_agree_and_the_prefix_cache_helps() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompt = "x" * 40
    async with fake_llm() as llm:
        outputs = [output async for output in llm.beam_search(prompt, "b", params)]
        stats = await llm.get_stats()
    assert len(outputs) == 1 and outputs[0].finished and outputs[0].prompt == prompt
    answers = outputs[0].outputs
    assert [one.index for one in answers] == [0, 1, 2]
    assert stats["prefix_cache_stats"]["hits"] > stats["prefix_cache_stats"]["queries"] / 2
    with LLM("fake:", executor_class=FAKE, quiet=True) as blocking:
        for limit in (None, 1):
            found = blocking.beam_search([prompt, "yz"], params, concurrency_limit=limit)
            assert [beam.text for beam in found[0].sequences] == [prompt + one.text for one in answers]
            assert [beam.cum_logprob for beam in found[0].sequences] == [one.cumulative_logprob for one in answers]
            assert len(found[1].sequences) == 3
        assert blocking.llm_engine.get_num_unfinished_requests() == 0


async def test_leaving_early_ends_the_beams() -> None:
    async with fake_llm("step_ms=5") as llm:
        stream = llm.beam_search("abc", "b", BeamSearchParams(beam_width=3, max_tokens=500))
        task = asyncio.ensure_future(anext(stream))
        async with asyncio.timeout(10):
            while not llm.num_unfinished_requests:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while llm.num_unfinished_requests:  # noqa: ASYNC110
                await asyncio.sleep(0)
