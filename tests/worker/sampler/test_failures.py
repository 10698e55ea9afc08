"""What fails one request, and leaves its neighbours alone."""

import math

import pytest
import torch

from llmkernel.engine.worker.sampler import Sampler
from tests.worker.sampler.batch_tools import CPU, make_logits, params, sample

WAYS = [
    {"temperature": 0},
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"repetition_penalty": 1.2},
    {"allowed_token_ids": [1, 2]},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("everywhere", [False, True])
def test_broken_logits_fail_their_request_only(dtype: torch.dtype, bad: float, way: dict, everywhere: bool) -> None:
    logits = make_logits(3, 1000).to(dtype)
    requests = [params(seed=i, logprobs=2, **way) for i in range(3)]
    sound = sample(logits, requests, prompt=[5])
    logits[1, slice(None) if everywhere else 900] = math.copysign(bad, bad)
    if bad != bad and math.copysign(1, bad) < 0:
        bits = logits.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[1][logits[1].isnan()] |= -(2**31) if dtype == torch.float32 else -(2**15)
    result = sample(logits, requests, prompt=[5])
    assert result.token_ids == [sound.token_ids[0], -1, sound.token_ids[2]]
    assert list(result.errors) == ["1"] and "NaN or infinity" in result.errors["1"]
    assert set(result.logprobs) == {"0", "2"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed_fails_with_the_reason(temperature: float) -> None:
    logits = make_logits(2, 100)
    closed = params(temperature=temperature, allowed_token_ids=[7, 9], min_tokens=3, stop_token_ids=[7])
    result = sample(logits, [closed, params(temperature=0)], [[1], [1]], eos=9)
    assert result.token_ids == [-1, int(logits[1].argmax())]
    assert list(result.errors) == ["0"]
    assert "output position 1" in result.errors["0"] and "allow more" in result.errors["0"]
    assert sample(logits[:1], [closed], [[1, 1, 1]], eos=9).token_ids[0] in (7, 9)


def test_a_penalty_that_overflows_is_named() -> None:
    result = sample(make_logits(1, 50), [params(repetition_penalty=1e-45)], prompt=list(range(50)))
    assert result.token_ids == [-1] and "repetition_penalty" in result.errors["0"]


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {100: 1.0}}, {"allowed_token_ids": [3, 100]}, {"bad_words": None}], ids=str
)
def test_token_ids_outside_the_vocabulary_fail_their_request(fields: dict) -> None:
    sampler = Sampler(100, CPU)
    name = next(iter(fields))
    sampler.add("bad", params(**fields), [], None, [[3, 100]] if name == "bad_words" else None)
    sampler.add("good", params(temperature=0), [], None, None)
    logits = make_logits(2, 100)
    result = sampler.sample(logits, ["bad", "good"], [[], []])
    assert result.token_ids == [-1, int(logits[1].argmax())]
    assert name in result.errors["bad"] and "100" in result.errors["bad"]


def test_prompt_and_output_ids_outside_the_vocabulary_are_let_pass() -> None:
    request = params(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    logits = make_logits(1, 100)
    assert sample(logits, [request], [[150, -1]], prompt=[100, 10**9]).token_ids == [int(logits.argmax())]


def test_removed_requests_are_forgotten_and_ids_can_come_again() -> None:
    sampler = Sampler(100, CPU)
    sampler.remove("never added")
    sampler.add("a", params(temperature=0, logit_bias={4: 100.0}), [], None, None)
    assert sampler.sample(make_logits(1, 100), ["a"], [[]]).token_ids == [4]
    sampler.remove("a")
    sampler.add("a", params(temperature=0, logit_bias={6: 100.0}), [], None, None)
    assert sampler.sample(make_logits(1, 100), ["a"], [[]]).token_ids == [6]
