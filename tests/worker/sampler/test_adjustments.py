"""Penalties, biases and masks: counts kept step by step, masks that win, places where they begin and end."""

import numpy as np
import pytest

from llmkernel.engine.worker.sampler import Sampler
from llmkernel.engine.worker.sampler.penalties import TokenCounts
from tests.worker.sampler.batch_tools import CPU, make_logits, params, sample


def counted(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_counts_kept_step_by_step_equal_counts_made_at_once() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 40).tolist()
    kept, output = TokenCounts(300, prompt), []
    for step in range(400):
        output.append(int(rng.integers(0, 300)))
        if step % 3 == 0:
            kept.update(output)
    kept.update(output)
    fresh = TokenCounts(300, prompt)
    fresh.update(output)
    assert counted(kept) == counted(fresh)
    assert counted(kept) == {t: output.count(t) for t in {*prompt, *output}}


def test_counts_begin_again_when_the_output_is_another_one() -> None:
    counts = TokenCounts(10, [1])
    counts.update([2, 2, 3])
    counts.update([2, 2, 4, 5])
    assert counted(counts) == {1: 0, 2: 2, 4: 1, 5: 1}
    counts.update([])
    assert counted(counts) == {1: 0}
    counts.update([7])
    assert counted(counts) == {1: 0, 7: 1}


def test_a_run_with_penalties_is_the_same_after_preemption() -> None:
    request = params(seed=3, temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3)
    logits = [make_logits(1, 500, seed=step, spread=1.5) for step in range(60)]
    steady, output = Sampler(500, CPU), []
    steady.add("a", request, [1, 2, 3], None, None)
    for row in logits:
        output += steady.sample(row, ["a"], [list(output)]).token_ids
    resumed = Sampler(500, CPU)
    for step, row in enumerate(logits):
        if step % 20 == 0:
            resumed.remove("a")
            resumed.add("a", request, [1, 2, 3], None, None)
        assert resumed.sample(row, ["a"], [output[:step]]).token_ids == [output[step]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_win_over_biases(temperature: float) -> None:
    request = params(temperature=temperature, logit_bias={4: 100.0, 5: 100.0, 6: 100.0, 7: 99.0}, min_tokens=2)
    logits = make_logits(1, 100) * 0
    assert sample(logits, [request], [[1]], eos=4, bad_words=[[5], [1, 6]]).token_ids == [7]
    assert sample(logits, [request], [[1, 1]], eos=4, bad_words=[[5], [1, 6], [7]]).token_ids == [4]


def test_min_tokens_forbids_every_stop_id_until_it_is_reached() -> None:
    request = params(temperature=0, min_tokens=3, stop_token_ids=[8, 9], ignore_eos=True)
    logits = make_logits(1, 50)
    logits[0, [7, 8, 9]] = 90.0
    logits[0, 11] = 80.0
    tokens = [sample(logits, [request], [[0] * length], eos=7).token_ids[0] for length in range(5)]
    assert tokens == [11, 11, 11, 7, 7]


def test_bad_words_look_at_the_output_only_and_need_their_whole_prefix() -> None:
    request, logits = params(temperature=0), make_logits(1, 50)
    logits[0, 5], logits[0, 6] = 90.0, 80.0
    words = [[1, 2, 5], []]
    for output, token in (([], 5), ([2], 5), ([1, 2], 6), ([1, 2, 1], 5), ([0, 1, 2], 6)):
        assert sample(logits, [request], [output], prompt=[1, 2], bad_words=words).token_ids == [token]


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = make_logits(1, 50) * 0 + 1
    logits[0, 5], logits[0, 6] = 3.0, 2.9
    for fields, prompt, output, token in (
        ({"repetition_penalty": 2.0}, [5], [], 6),
        ({"frequency_penalty": 1.0}, [5], [], 5),
        ({"presence_penalty": 1.0}, [5], [], 5),
        ({"frequency_penalty": 0.06}, [], [5, 5], 6),
        ({"frequency_penalty": 0.06}, [], [5], 5),
        ({"presence_penalty": 0.06}, [], [5, 5], 5),
        ({"presence_penalty": 0.11}, [], [5], 6),
    ):
        assert sample(logits, [params(temperature=0, **fields)], [output], prompt=prompt).token_ids == [token]


def test_equal_logits_at_the_kth_place_are_all_kept_and_top_p_takes_the_lower_id() -> None:
    logits = make_logits(1, 300) * 0 - 9
    logits[0, [20, 40, 250]] = 2.0
    logits = logits.expand(400, -1)
    kept = {top_k: set(sample(logits, [params(seed=s, top_k=top_k) for s in range(400)]).token_ids) for top_k in (1, 3)}
    assert kept == {1: {20, 40, 250}, 3: {20, 40, 250}}
    for top_p, tokens in ((0.1, {20}), (0.34, {20, 40}), (0.6, {20, 40}), (0.7, {20, 40, 250})):
        requests = [params(seed=seed, top_k=3, top_p=top_p) for seed in range(400)]
        assert set(sample(logits, requests).token_ids) == tokens
