"""The sampler and the reference draw the same token from the same uniform, whatever is combined with what.

They may part where a cut or the uniform lies within 1e-4 of the place where it falls the other way: float32, float64.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.worker.sampler import Sampler
from llmkernel.protocol.sampling_params import SamplingParams
from tests.worker.sampler.reference import Case, as_float64, distribution, draw, uniform

GAP = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def settings_of(draw_from: st.DrawFn, vocab_size: int) -> dict[str, Any]:
    """Each parameter is left out half of the time; ids are few, so that parameters meet on the same ones."""
    ids = st.integers(0, min(vocab_size, 40) - 1)
    choices: dict[str, st.SearchStrategy] = {
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.3, 2.0]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.999]),
        "top_k": st.sampled_from([1, 2, 5, 63, 64, 65, 300, 10**6]),
        "min_p": st.sampled_from([0.001, 0.05, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 0.1, 5.0, 100.0]), min_size=1, max_size=5),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=8),
        "min_tokens": st.integers(1, 8),
        "stop_token_ids": st.lists(ids, min_size=1, max_size=4),
    }
    return {name: draw_from(choice) for name, choice in choices.items() if draw_from(st.booleans())}


def logits_of(kind: str, seed: int, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=vocab_size)
    if kind == "peaked":
        return noise - 2.5 * np.log(1 + rng.permutation(vocab_size))
    return {
        "normal": noise * 3,
        "flat": noise * 0.01,
        "ties": np.round(noise * 2),
        "negative": noise - 40,
        "holes": np.where((rng.random(vocab_size) < 0.7) & (np.arange(vocab_size) > 0), -np.inf, noise),
        "equal": np.zeros(vocab_size),
    }[kind]


@st.composite
def batches(draw_from: st.DrawFn, sizes: tuple[int, ...], rows: int) -> tuple[torch.Tensor, list[Case]]:
    vocab_size = draw_from(st.sampled_from(sizes))
    ids = st.integers(0, min(vocab_size, 40) - 1)
    dtype = draw_from(st.sampled_from(DTYPES))
    logits, cases = [], []
    for _ in range(draw_from(st.integers(1, rows))):
        kind = draw_from(st.sampled_from(["normal", "peaked", "flat", "ties", "negative", "holes", "equal"]))
        row = torch.from_numpy(logits_of(kind, draw_from(st.integers(0, 2**32)), vocab_size)).to(dtype)
        params = SamplingParams(
            seed=draw_from(st.integers(0, 2**63 - 1)), max_tokens=None, **settings_of(draw_from, vocab_size)
        )
        prompt, output = draw_from(st.lists(ids, max_size=12)), draw_from(st.lists(ids, max_size=12))
        words = draw_from(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3))
        words += [[*output[-2:], draw_from(ids)]] if output and draw_from(st.booleans()) else []
        eos = draw_from(st.none() | ids)
        logits.append(row)
        grammar = None
        if draw_from(st.integers(0, 2)) == 0:
            rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
            grammar = rng.random(vocab_size) < draw_from(st.sampled_from([0.02, 0.5, 1.0]))
        cases.append(Case(params, prompt, output, eos, words, as_float64(row), grammar))
    return torch.stack(logits), cases


def masks_of(ids: list[str], cases: list[Case]) -> GrammarMasks | None:
    """The bit masks of the cases that have a grammar, as the engine hands them over."""
    allowed = {req_id: case.grammar for req_id, case in zip(ids, cases, strict=True) if case.grammar is not None}
    if not allowed:
        return None
    bits = np.zeros((len(allowed), -(-len(cases[0].logits) // 32) * 32), bool)
    bits[:, : len(cases[0].logits)] = list(allowed.values())
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return GrammarMasks({req_id: row for row, req_id in enumerate(allowed)}, words)


def check_batch(logits: torch.Tensor, cases: list[Case], tally: Counter) -> None:
    sampler = Sampler(logits.shape[1], torch.device("cpu"))
    ids = [f"r{i}" for i in range(len(cases))]
    for req_id, case in zip(ids, cases, strict=True):
        sampler.add(req_id, case.params, case.prompt, case.eos, case.bad_words)
    result = sampler.sample(logits, ids, [case.output for case in cases], masks_of(ids, cases))
    for req_id, case, token in zip(ids, cases, result.token_ids, strict=True):
        tally["rows"] += 1
        found = distribution(case)
        if not found.probabilities.any():
            tally["nothing allowed"] += 1
            assert token == -1 and "allow" in result.errors[req_id]
            continue
        assert req_id not in result.errors
        expected, gap = draw(found, uniform(case.params.seed or 0, len(case.output)))
        if token != expected:
            tally["parted"] += 1
            assert gap < GAP, (token, expected, gap, case.params)


def test_small_vocabularies() -> None:
    tally: Counter = Counter()

    @settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(batches((2, 17, 64, 100, 200, 513), 6))
    def run(batch: tuple[torch.Tensor, list[Case]]) -> None:
        check_batch(*batch, tally)

    run()
    print(f"small vocabularies: {dict(tally)}")
    assert tally["rows"] > 500 and tally["nothing allowed"] > 10
    assert tally["parted"] <= tally["rows"] // 100


def test_the_default_models_vocabulary() -> None:
    tally: Counter = Counter()

    @settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(batches((49152, 50257), 4))
    def run(batch: tuple[torch.Tensor, list[Case]]) -> None:
        check_batch(*batch, tally)

    run()
    print(f"large vocabularies: {dict(tally)}")
    assert tally["rows"] > 30
    assert tally["parted"] <= tally["rows"] // 20
