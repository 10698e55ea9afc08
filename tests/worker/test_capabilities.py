"""Whole models on lesser processors, and on a torch without the private operations that make ours fast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llmkernel.engine.worker.linear.int4_linear import int4_works
from llmkernel.engine.worker.linear.int8_linear import int8_works
from llmkernel.engine.worker.linear.packed_linear import packing_works
from llmkernel.errors import UnsupportedFeatureError
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

PROMPTS = [[5, 17, 80, 3, 44, 9, 61], [7, 7, 2], list(range(20, 60))]
WAYS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
FARTHEST = {"none": 0.05, "int8": 0.15, "int4": 0.9}
"""Relative distance of logits from float32's; random weights take rounding badly."""

CAPABILITIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}

_RUN = """
import json, sys, torch
from llmkernel.errors import UnsupportedFeatureError
from tests.worker.engine_run import EngineRun
from tests.worker.test_capabilities import PROMPTS, WAYS, first_logits
answers = []
for dtype, quantization in WAYS:
    try:
        with EngineRun(sys.argv[1], dtype=dtype, quantization=quantization) as run:
            answers.append(first_logits(run).tolist())
    except UnsupportedFeatureError as error:
        answers.append(str(error))
print(json.dumps([torch.backends.cpu.get_cpu_capability(), answers]))
"""


def first_logits(run: EngineRun) -> np.ndarray:
    """Logits [prompts, vocab] in front of the first token of each answer, less their mean."""
    logits = np.stack([answer.logits[0] for answer in run.generate(PROMPTS, 4, logits=True)])
    return logits - logits.mean(-1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_fused_family("llama-biases", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> np.ndarray:
    with EngineRun(folder, dtype="float32") as run:
        return first_logits(run)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_models_run_without_the_fast_instructions(capability: str, folder: Path, exact: np.ndarray) -> None:
    """Every dtype and quantization is right at that level, or refused by name."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder)],
        env=os.environ | CAPABILITIES[capability],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    level, answers = json.loads(done.stdout)
    assert level.lower() in (capability, "no avx" if capability == "default" else capability)
    assert not isinstance(answers[0], str) and not isinstance(answers[1], str)
    for (dtype, quantization), answer in zip(WAYS, answers, strict=True):
        if isinstance(answer, str):
            assert f"quantization = {quantization!r} needs a kernel that this torch does not have here" in answer
            continue
        distance = np.linalg.norm(np.array(answer) - exact) / np.linalg.norm(exact)
        assert distance < (1e-4 if dtype == "float32" else FARTHEST[quantization])


def test_a_torch_without_the_private_operations(
    folder: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "ops", torch.ops.prims)  # it has none of them
    works = (int4_works, int8_works, packing_works)
    for check in works:
        check.cache_clear()
    try:
        assert not any(check() for check in works)
        with EngineRun(folder, dtype="bfloat16") as run:
            assert np.linalg.norm(first_logits(run) - exact) < FARTHEST["none"] * np.linalg.norm(exact)
            assert "Weights: " in (said := " ".join(run.core.ready.model.notes)) and "packed" not in said
        with EngineRun(folder, dtype="bfloat16", quantization="int4") as run:  # by compiled kernels
            assert np.linalg.norm(first_logits(run) - exact) < FARTHEST["int4"] * np.linalg.norm(exact)
        with pytest.raises(UnsupportedFeatureError, match="needs a kernel that this torch does not have here"):
            EngineRun(folder, dtype="bfloat16", quantization="int4", enforce_eager=True)
    finally:
        for check in works:
            check.cache_clear()
