"""A row draws the same token alone, in any batch and in any order, and gives the same logprobs."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from llmkernel.engine.worker.sampler import Sampler, SamplerOutput
from tests.worker.sampler.batch_tools import CPU, make_logits, params

REQUESTS = [
    params(temperature=0),
    params(temperature=0, logprobs=3),
    params(temperature=0, logit_bias={7: 30.0}),
    params(seed=1),
    params(seed=2, temperature=0.3, logprobs=0),
    params(seed=3, top_p=0.9),
    params(seed=3, top_p=0.999, temperature=1.5),
    params(seed=4, top_k=40),
    params(seed=5, top_k=100, top_p=0.8, logprobs=5),
    params(seed=6, top_k=700),
    params(seed=7, min_p=0.05),
    params(seed=8, min_p=1e-6, top_p=0.99, temperature=2),
    params(seed=9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    params(seed=10, allowed_token_ids=[3, 5, 8], logprobs=2),
    params(temperature=0, allowed_token_ids=[3], min_tokens=30, stop_token_ids=[3]),
    params(seed=12, min_tokens=5, stop_token_ids=[1, 2], top_p=0.7, logprobs=-1),
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Work that is shared out must not change a bit."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def same(whole: SamplerOutput, alone: SamplerOutput, row: int, req_id: str) -> None:
    assert whole.token_ids[row] == alone.token_ids[0]
    assert whole.errors.get(req_id) == alone.errors.get(req_id)
    assert (req_id in whole.logprobs) == (req_id in alone.logprobs)
    if req_id in whole.logprobs:
        mine, other = whole.logprobs[req_id], alone.logprobs[req_id]
        assert np.array_equal(mine.logprob_token_ids, other.logprob_token_ids)
        assert np.array_equal(mine.logprobs, other.logprobs)
        assert np.array_equal(mine.sampled_token_ranks, other.sampled_token_ranks)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1000, 49152, 50257])
def test_alone_in_a_batch_and_in_any_order(vocab_size: int, dtype: torch.dtype, mode: str) -> None:
    sampler = Sampler(vocab_size, CPU, logprobs_mode=mode)  # type: ignore[arg-type]
    ids = [f"r{i}" for i in range(len(REQUESTS))]
    outputs = [list(range(i % 7)) for i in range(len(REQUESTS))]
    for req_id, request in zip(ids, REQUESTS, strict=True):
        sampler.add(req_id, request, [1, 2, 3], 2, [[4], [0, 1]])
    logits = make_logits(len(ids), vocab_size, seed=vocab_size).to(dtype)
    kept = logits.clone()
    whole = sampler.sample(logits, ids, outputs)
    assert torch.equal(logits, kept)
    assert set(whole.errors) == {"r14"} and set(whole.logprobs) == {"r1", "r4", "r8", "r13", "r15"}
    for row, req_id in enumerate(ids):
        same(whole, sampler.sample(logits[row : row + 1], [req_id], [outputs[row]]), row, req_id)
    order = list(range(len(ids)))
    random.Random(vocab_size).shuffle(order)
    mixed = sampler.sample(logits[order], [ids[i] for i in order], [outputs[i] for i in order])
    assert mixed.token_ids == [whole.token_ids[i] for i in order]
    for place, i in enumerate(order):
        same(mixed, sampler.sample(logits[i : i + 1], [ids[i]], [outputs[i]]), place, ids[i])


def test_rows_that_only_differ_in_their_seed_in_a_large_batch() -> None:
    logits = make_logits(1, 49152, spread=2.0).expand(70, -1)
    sampler = Sampler(49152, CPU)
    ways = [params(seed=seed, **way) for seed in range(35) for way in ({}, {"top_p": 0.95})]
    ids = [str(i) for i in range(70)]
    for req_id, request in zip(ids, ways, strict=True):
        sampler.add(req_id, request, [], None, None)
    whole = sampler.sample(logits, ids, [[]] * 70).token_ids
    alone = [sampler.sample(logits[:1], [req_id], [[]]).token_ids[0] for req_id in ids]
    assert whole == alone
    assert len(set(whole)) > 30
