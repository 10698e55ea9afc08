"""Counter-based draws: bit for bit the reference's, uniform, independent of neighbours, of the right distribution."""

import random

import numpy as np
import pytest
import torch

from llmkernel.engine.worker.sampler import Sampler
from llmkernel.engine.worker.sampler.draws import seed_key, uniforms
from tests.worker.sampler.batch_tools import CPU, make_logits, params, sample
from tests.worker.sampler.reference import Case, as_float64, distribution, uniform

DRAWS = 20_000


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square; cells that expect fewer than 5 are put together."""
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_uniforms_equal_the_python_integers_bit_for_bit() -> None:
    rng = random.Random(1)
    seeds = [0, 1, 2**31, 2**63 - 1, *(rng.getrandbits(63) for _ in range(2000))]
    positions = [0, 1, 2**20, 2**31, *(rng.getrandbits(20) for _ in range(2000))]
    drawn = uniforms(torch.tensor([seed_key(seed) for seed in seeds]), torch.tensor(positions))
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [uniform(*pair) for pair in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform_and_neighbours_are_independent(along: str) -> None:
    steps = torch.arange(DRAWS)
    keys = torch.tensor([seed_key(seed) for seed in range(DRAWS)]) if along == "seeds" else torch.tensor([seed_key(7)])
    drawn = uniforms(keys, torch.tensor([3]) if along == "seeds" else steps).numpy()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert p_value(np.histogram(drawn, 100, (0, 1))[0], np.full(100, DRAWS / 100)) > 0.001
    pairs = np.histogram2d(drawn[:-1], drawn[1:], 20, [(0, 1), (0, 1)])[0].ravel()
    assert p_value(pairs, np.full(400, (DRAWS - 1) / 400)) > 0.001


WAYS = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "top_k, top_p": {"temperature": 0.9, "top_k": 30, "top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "everything": {
        "temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.2,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {5: 2.0, 9: -1.0}, "min_tokens": 9,
        "stop_token_ids": [3],
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_frequencies_over_seeds_follow_the_distribution(way: str) -> None:
    row = make_logits(1, 300, seed=4, spread=1.5)
    prompt, output = [1, 2, 3, 5], [5, 6, 6]
    case = Case(params(**WAYS[way]), prompt, output, 8, [[6, 11], [12]], as_float64(row[0]))
    requests = [params(seed=seed, **WAYS[way]) for seed in range(DRAWS)]
    logits = row.expand(DRAWS, -1)
    drawn = sample(logits, requests, [output] * DRAWS, prompt=prompt, eos=8, bad_words=case.bad_words)
    observed = np.bincount(drawn.token_ids, minlength=300)
    expected = distribution(case).probabilities
    assert not observed[expected == 0].any()
    assert p_value(observed, expected * DRAWS) > 0.001


def test_frequencies_over_positions_follow_the_distribution() -> None:
    row, request = make_logits(1, 200, seed=5, spread=1.0), params(seed=11, temperature=0.9, top_p=0.97)
    sampler = Sampler(200, CPU)
    sampler.add("a", request, [], None, None)
    tokens: list[int] = []
    output: list[int] = []
    for _ in range(3000):
        tokens += sampler.sample(row, ["a"], [output]).token_ids
        output.append(0)
    expected = distribution(Case(request, [], [], None, [], as_float64(row[0]))).probabilities * len(tokens)
    assert p_value(np.bincount(tokens, minlength=200), expected) > 0.001


def test_a_seed_gives_the_same_tokens_again_and_another_seed_gives_others() -> None:
    logits = make_logits(1, 2000, spread=0.5).expand(4, -1)
    twice = [sample(logits, [params(seed=seed) for seed in (1, 1, 2, 2**63 - 1)]).token_ids for _ in range(2)]
    assert twice[0] == twice[1]
    assert twice[0][0] == twice[0][1] and len(set(twice[0])) == 3


def test_requests_without_a_seed_get_seeds_of_their_own_or_the_default_one() -> None:
    logits = torch.zeros(8, 50_000)
    free = sample(logits, [params()] * 8).token_ids
    assert len(set(free)) > 1
    assert sample(logits, [params()] * 8, default_seed=3).token_ids == sample(logits, [params(seed=3)] * 8).token_ids
