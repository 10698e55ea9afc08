"""The greedy pick is the first index of the maximum, in every float type."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmkernel.engine.worker.sampler.greedy import pick_greedy
from tests.worker.sampler.batch_tools import make_logits, params, sample

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VALUES = st.sampled_from([-np.inf, -5.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 0.5, 0.5001, 7.0, 300.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_argmax_for_any_values_and_ties(dtype: torch.dtype) -> None:
    @settings(max_examples=80, derandomize=True, deadline=None, database=None)
    @given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 200)), elements=VALUES, fill=VALUES))
    def run(rows: np.ndarray) -> None:
        logits = torch.from_numpy(rows).to(dtype)
        tokens, best = pick_greedy(logits)
        exact = logits.float().numpy()
        assert tokens.tolist() == exact.argmax(-1).tolist()
        assert best.tolist() == exact.max(-1).tolist()

    run()


@pytest.mark.parametrize("vocab_size", [63, 64, 1000, 49152, 50257])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, -60.0])
def test_equals_argmax_of_large_rows(vocab_size: int, dtype: torch.dtype, shift: float) -> None:
    logits = (make_logits(9, vocab_size, seed=vocab_size) + shift).to(dtype)
    logits[3] = logits[3].round()
    logits[4] = logits[4, 0]
    tokens = sample(logits, [params(temperature=0)] * 9).token_ids
    assert tokens == logits.float().numpy().argmax(-1).tolist()


def test_a_temperature_of_zero_ignores_truncation_and_seed() -> None:
    logits = make_logits(1, 500)
    request = params(temperature=0, top_k=3, top_p=0.1, min_p=0.2, seed=4)
    assert sample(logits, [request]).token_ids == [int(logits.argmax())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_minus_zero_are_equal(dtype: torch.dtype) -> None:
    rows = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0], [-2.0, -1.0, -0.0]], dtype=dtype)
    assert pick_greedy(rows)[0].tolist() == [1, 1, 2]
