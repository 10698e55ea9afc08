"""Logprobs of samples and prompts against torch's log_softmax and NumPy's sorting."""

import numpy as np
import pytest
import torch

from llmkernel.engine.worker.sampler.logprobs import gather_logprobs
from llmkernel.protocol.outputs import LogprobsLists
from tests.worker.sampler.batch_tools import make_logits, params, sample


def check(lists: LogprobsLists, logits: torch.Tensor, chosen: list[int], count: int, tolerance: float = 1e-5) -> None:
    expected = logits.double().log_softmax(-1).numpy()
    rows, vocab_size = expected.shape
    exact = logits.float().numpy()
    assert lists.logprob_token_ids.dtype == np.int32 and lists.logprobs.dtype == np.float32
    assert lists.sampled_token_ranks.dtype == np.int32
    width = 1 + (vocab_size if count < 0 else min(count, vocab_size))
    assert lists.logprob_token_ids.shape == lists.logprobs.shape == (rows, width)
    for row in range(rows):
        order = np.lexsort((np.arange(vocab_size), -exact[row]))
        best = np.arange(vocab_size) if count < 0 else order[:count]
        assert lists.logprob_token_ids[row].tolist() == [chosen[row], *best.tolist()]
        values = expected[row, lists.logprob_token_ids[row]]
        finite = np.isfinite(values)
        assert np.array_equal(np.isfinite(lists.logprobs[row]), finite)
        assert np.abs(lists.logprobs[row][finite] - values[finite]).max() < tolerance
        assert lists.sampled_token_ranks[row] == (exact[row] >= exact[row, chosen[row]]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 49152])
@pytest.mark.parametrize("count", [-1, 0, 1, 5, 20])
def test_of_a_prompt(vocab_size: int, dtype: torch.dtype, count: int) -> None:
    rows = 35
    logits = make_logits(rows, vocab_size, seed=count + 2).to(dtype)
    logits[3] = logits[3].round()
    logits[4] = 0.25
    logits[5, 1:] = -torch.inf
    logits[6] = 0.0
    logits[6, ::2] = -0.0
    chosen = torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(1))
    chosen[5] = 0
    check(gather_logprobs(logits, chosen, count), logits, chosen.tolist(), count)


def test_of_samples_are_of_the_raw_logits_and_each_request_gets_its_own_count() -> None:
    logits = make_logits(5, 3000)
    requests = [
        params(temperature=0, logprobs=0, logit_bias={9: 50.0}),
        params(seed=1, temperature=0.4, logprobs=4),
        params(seed=2, top_k=2, repetition_penalty=1.5),
        params(seed=3, top_p=0.5, logprobs=-1),
        params(temperature=0, logprobs=20),
    ]
    result = sample(logits, requests, prompt=[1, 2])
    assert set(result.logprobs) == {"0", "1", "3", "4"}
    for row, count in ((0, 0), (1, 4), (3, -1), (4, 20)):
        check(result.logprobs[str(row)], logits[row : row + 1], [result.token_ids[row]], count)
    assert result.token_ids[0] == 9 and result.logprobs["4"].sampled_token_ranks.tolist() == [1]
    whole = result.logprobs["4"].logprobs
    assert whole.base is None, "a position must not keep the whole batch's memory alive"


def test_processed_logprobs_are_of_what_was_drawn_from() -> None:
    logits = make_logits(3, 400)
    requests = [
        params(seed=1, temperature=0.5, top_k=3, logprobs=-1),
        params(temperature=0, logit_bias={9: 50.0}, logprobs=2),
        params(temperature=0, logprobs=2),
    ]
    result = sample(logits, requests, logprobs_mode="processed_logprobs")
    cut = logits[0] / 0.5
    cut[cut < cut.topk(3).values[-1]] = -torch.inf
    biased = logits[1].clone()
    biased[9] += 50
    for row, (processed, count) in enumerate(((cut, -1), (biased, 2), (logits[2], 2))):
        check(result.logprobs[str(row)], processed.unsqueeze(0), [result.token_ids[row]], count)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_in_place_of_logprobs(mode: str) -> None:
    logits = make_logits(1, 400)
    result = sample(logits, [params(seed=1, temperature=0.5, logprobs=3)], logprobs_mode=mode)
    lists = result.logprobs["0"]
    expected = logits[0, lists.logprob_token_ids[0].tolist()] / (1.0 if mode == "raw_logits" else 0.5)
    assert lists.logprobs[0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
