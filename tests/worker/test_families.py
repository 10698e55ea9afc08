"""Each family of models against transformers: the same logits and the same greedy ids, however the work is cut up."""

from pathlib import Path

import numpy as np
import pytest

from tests.worker import tiny_models
from tests.worker.engine_run import Comparison, EngineRun, Reference

LENGTHS = (1, 2, 7, 16, 17, 33, 60, 90)
NEW_TOKENS = 24
TOLERANCE = 1e-4
"""Largest difference of float32 logits (they span about ten units); measured: below 3e-5."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, tiny_models.VOCAB_SIZE, length).tolist() for length in LENGTHS]


CASES = [("transformers", family) for family in tiny_models.FAMILIES] + [
    ("fused", family) for family in tiny_models.FUSED_FAMILIES
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def implementation(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def folder(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    implementation, family = case
    save = tiny_models.save_fused_family if implementation == "fused" else tiny_models.save_family
    return save(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.row("A-017")
def test_alone_and_together_cold_and_warm(
    folder: Path, implementation: str, reference: Reference, prompts: list[list[int]]
) -> None:
    seen = Comparison(reference, TOLERANCE)
    for chunk in (16, 64, 2048):
        with EngineRun(folder, implementation=implementation, block_size=16, max_num_batched_tokens=chunk) as run:
            assert run.core.ready.model.implementation == implementation
            alone = [run.generate([prompt], NEW_TOKENS, logits=True)[0] for prompt in prompts]
            assert all(answer.num_cached == 0 for answer in alone)
            seen.check(prompts, alone, f"alone, chunks of {chunk}")
            warm = run.generate(prompts, NEW_TOKENS, logits=True)
            assert [answer.num_cached for answer in warm] == [(length - 1) // 16 * 16 for length in LENGTHS]
            seen.check(prompts, warm, f"together, warm, chunks of {chunk}")
            run.core.call_utility("reset_prefix_cache")
            seen.check(prompts, run.generate(prompts, NEW_TOKENS, logits=True), f"together, cold, chunks of {chunk}")
    print(f"{folder.name}, {implementation}: {seen}")


@pytest.mark.row("A-017")
def test_preempted_and_resumed(
    folder: Path, implementation: str, reference: Reference, prompts: list[list[int]]
) -> None:
    seen = Comparison(reference, TOLERANCE)
    pool = _pool_of(folder, blocks=24)
    with EngineRun(folder, implementation=implementation, block_size=8, kv_cache_memory=pool) as run:
        seen.check(prompts, run.generate(prompts, NEW_TOKENS, logits=True), "small pool")
        assert run.num_preempted > 0
    print(f"{folder.name}, {implementation}: {seen}, {run.num_preempted} preemptions")


def _pool_of(folder: Path, blocks: int) -> int:
    """Bytes of a pool of so many blocks of 8 tokens."""
    with EngineRun(folder, block_size=8, kv_cache_memory="1MiB") as run:
        return run.core.ready.kv_cache_bytes // run.core.ready.num_gpu_blocks * blocks
