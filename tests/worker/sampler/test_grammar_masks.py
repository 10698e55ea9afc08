"""Grammar masks on rows of logits: bits, edges, and what is said when nothing is left."""

import numpy as np
import pytest
import torch

from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.worker.sampler import Sampler
from llmkernel.engine.worker.sampler.masks import keep_allowed
from tests.worker.sampler.batch_tools import CPU, make_logits, params


def words_of(allowed: list[int], num_words: int) -> np.ndarray:
    bits = np.zeros(num_words * 32, bool)
    bits[allowed] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("num_words", [1, 2, 31, 40])
def test_bits_against_a_loop(size: int, num_words: int) -> None:
    rng = np.random.default_rng(size * num_words)
    words = rng.integers(-(2**31), 2**31, num_words, dtype=np.int64).astype(np.int32)
    row = make_logits(1, size)[0]
    row[size // 2] = -torch.inf
    expected = row.clone()
    for token in range(size):
        word = int(words[token // 32]) if token < num_words * 32 else 0
        if not word >> token % 32 & 1:
            expected[token] = -torch.inf
    keep_allowed(row, words)
    assert torch.equal(row, expected)


@pytest.mark.parametrize("way", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}], ids=str)
def test_only_rows_with_a_grammar_are_held_to_one(way: dict) -> None:
    sampler = Sampler(100, CPU)
    for req_id in "abc":
        sampler.add(req_id, params(**way), [], None, None)
    logits = make_logits(3, 100)
    free = sampler.sample(logits, list("abc"), [[], [], []]).token_ids
    masks = GrammarMasks({"b": 0}, words_of([77], 4)[None])
    assert sampler.sample(logits, list("abc"), [[], [], []], masks).token_ids == [free[0], 77, free[2]]


def test_min_tokens_gives_way_where_a_grammar_can_only_end() -> None:
    sampler = Sampler(100, CPU)
    for req_id in "ab":
        sampler.add(req_id, params(temperature=0, min_tokens=5), [], 99, None)
    masks = GrammarMasks({"a": 0, "b": 1}, np.stack([words_of([99], 4), words_of([99, 3], 4)]))
    found = sampler.sample(make_logits(2, 100), ["a", "b"], [[1], [1]], masks)
    assert found.token_ids == [99, 3] and not found.errors


def test_nothing_left_names_the_grammar() -> None:
    sampler = Sampler(100, CPU)
    sampler.add("a", params(allowed_token_ids=[1, 2]), [], None, None)
    found = sampler.sample(make_logits(1, 100), ["a"], [[]], GrammarMasks({"a": 0}, words_of([3], 4)[None]))
    assert found.token_ids == [-1] and "the grammar of structured_outputs, allowed_token_ids" in found.errors["a"]


def test_logprobs_are_raw_beside_a_mask_and_masked_when_processed() -> None:
    logits = make_logits(1, 100)
    best = int(logits[0].argmax())
    masks = GrammarMasks({"a": 0}, words_of([5, 6], 4)[None])
    for mode in ("raw_logprobs", "processed_logprobs"):
        sampler = Sampler(100, CPU, logprobs_mode=mode)
        sampler.add("a", params(temperature=0, logprobs=2), [], None, None)
        found = sampler.sample(logits, ["a"], [[]], masks)
        ids = found.logprobs["a"].logprob_token_ids[0].tolist()
        assert ids[0] == found.token_ids[0] in (5, 6)
        assert (best in ids) == (mode == "raw_logprobs" or best in (5, 6))
        if mode == "processed_logprobs":
            assert set(ids) == {5, 6}
            assert np.exp(found.logprobs["a"].logprobs[0, 1:]).sum() == pytest.approx(1)
