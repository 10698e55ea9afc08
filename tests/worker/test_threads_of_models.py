"""The number of threads changes in the middle of answers: the tokens stay what they are, by design D13."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmkernel.engine.worker import loading
from llmkernel.engine.worker.cpu_share import read_cpu_share
from llmkernel.engine.worker.linear.int4_linear import int4_works
from llmkernel.engine.worker.linear.int8_linear import int8_works
from llmkernel.engine.worker.model_files import ModelFiles
from tests.worker import tiny_models
from tests.worker.engine_run import Comparison, EngineRun, Reference

pytestmark = pytest.mark.skipif(read_cpu_share().most_threads < 2, reason="one thread is all there is")

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
"""Large enough for torch to divide the work."""

LENGTHS = (3, 90)
TOKENS = 10


class EachStepAnother:
    """A thread rule: two, one, two, one ..."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def threads(self, now: float) -> int:
        return 2 - len(self.seen) % 2

    def took(self, threads: int, tokens: int, seconds: float) -> None:
        assert torch.get_num_threads() == threads
        self.seen.append(threads)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[EachStepAnother]:
    rule = EachStepAnother()
    monkeypatch.setattr(loading, "thread_rules", lambda share: [rule])
    yield rule
    assert rule.seen[:4] == [2, 1, 2, 1]
    assert len(rule.seen) >= TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", initializer_range=0.1, **SIZES)
    return tiny_models.save(model, tmp_path_factory.mktemp("llama"))


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(1, vocab_size, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("implementation", ["fused", "transformers"])
def test_float32_tokens_do_not_depend_on_threads(implementation: str, folder: Path, rule: EachStepAnother) -> None:
    asked = prompts(SIZES["vocab_size"])
    with EngineRun(folder, num_threads="auto", implementation=implementation) as run:
        seen = Comparison(Reference(folder), 2e-4)
        seen.check(asked, run.generate(asked, TOKENS, logits=True), "threads change")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_16_bit_logits_stay_close(quantization: str, folder: Path, rule: EachStepAnother) -> None:
    if not {"none": True, "int8": int8_works(), "int4": int4_works()}[quantization]:
        pytest.skip("torch has no such kernel here")
    asked = prompts(SIZES["vocab_size"])
    options = {"dtype": "bfloat16", "quantization": quantization}
    with EngineRun(folder, num_threads=1, **options) as run:
        steady = run.generate(asked, TOKENS, logits=True)
    with EngineRun(folder, num_threads="auto", **options) as run:
        changing = run.generate(asked, TOKENS, logits=True)
    for one, other in zip(steady, changing, strict=True):
        same = next(
            (at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), TOKENS
        )
        for want, got in zip(one.logits[:same], other.logits[:same], strict=True):
            assert np.abs(np.exp(want) - np.exp(got)).sum() < 0.1


@pytest.mark.slow
def test_the_default_model(smollm2_files: ModelFiles, rule: EachStepAnother) -> None:
    asked = prompts(40000)
    with EngineRun("smollm2", num_threads="auto") as run:
        seen = Comparison(Reference(smollm2_files.folder), 1e-3)
        seen.check(asked, run.generate(asked, 2 * TOKENS, logits=True), "threads change")
    print(f"SmolLM2, float32: {seen}")
