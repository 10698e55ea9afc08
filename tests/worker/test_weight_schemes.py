"""How weights are kept: GGUF's blocks as they are, rounding at load, and two forms side by side."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch.nn import functional

from llmkernel.engine.worker.linear import kernel_choice
from llmkernel.engine.worker.linear.group_linear import GroupLinear
from llmkernel.engine.worker.linear.group_weight import quantize_int4, quantize_int8
from llmkernel.engine.worker.linear.int4_linear import Int4Linear, int4_works
from llmkernel.engine.worker.linear.int8_linear import Int8Linear, int8_works
from llmkernel.engine.worker.linear.linear import Linear, PlainLinear
from llmkernel.engine.worker.linear.packed_linear import PackedLinear, packing_works
from llmkernel.engine.worker.linear.rows_linear import RowsLinear
from llmkernel.engine.worker.linear.scheme import FEW_ROWS, Copies, DenseScheme, GroupScheme
from llmkernel.engine.worker.models.gguf_blocks import GGUFBlocks
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun
from tests.worker.tiny_gguf import families, random_model, write_gguf

needs_int4 = pytest.mark.skipif(not int4_works(), reason="torch has no 4-bit kernel here")
needs_int8 = pytest.mark.skipif(not int8_works(), reason="torch has no 8-bit kernel here")
needs_packing = pytest.mark.skipif(not packing_works(), reason="oneDNN takes no bfloat16 here")


def distance(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> float:
    """Relative distance from the product in float32."""
    x = torch.randn(rows, weight.shape[1]).bfloat16()
    want = functional.linear(x.float(), weight, None if bias is None else bias.float())
    return float((linear(x).float() - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 3, 4, 17, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_every_form_multiplies(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(96, 128)
    bias = torch.randn(96).bfloat16() if biased else None
    assert distance(PlainLinear(weight.bfloat16(), bias), weight, bias, rows) < 5e-3
    if packing_works():
        assert distance(PackedLinear(weight.bfloat16(), bias), weight, bias, rows) < 5e-3
    if int8_works():
        assert distance(Int8Linear(weight, bias), weight, bias, rows) < 2e-2
    if int4_works():
        rounded = quantize_int4(weight)
        assert distance(Int4Linear(rounded, bias), rounded.dense(), bias, rows) < 5e-3
        assert distance(Int4Linear(rounded, bias), weight, bias, rows) < 0.15


def test_rounding_to_4_bits_is_half_a_step_at_most() -> None:
    weight = torch.randn(32, 64) * torch.logspace(-3, 3, 32)[:, None]
    rounded = quantize_int4(weight)
    off = (rounded.dense() - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    assert (off <= rounded.scales * 0.56).all()  # scale and minimum are rounded to float16
    assert torch.equal(quantize_int4(torch.zeros(16, 32)).dense(), torch.zeros(16, 32))


def test_rounding_to_8_bits_is_half_a_step_at_most() -> None:
    weight = torch.randn(32, 64) * torch.logspace(-3, 3, 32)[:, None]
    rounded = quantize_int8(weight)
    off = (rounded.dense() - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    assert (off <= rounded.scales * 0.6).all()  # the scale is rounded to float16
    assert torch.equal(quantize_int8(torch.zeros(16, 32)).dense(), torch.zeros(16, 32))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_blocks_of_a_file_are_kept_exactly(kind: Type, name: str, tmp_path: Path) -> None:
    tiny = families()[name]
    model = random_model(tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny, model, kind)
    with GGUFBlocks(tmp_path / "tiny.gguf") as blocks:
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
            weight = f"model.layers.1.{part}.weight"
            want = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[weight].numpy(), kind), kind)
            found = blocks.find(weight)
            assert found is not None
            np.testing.assert_array_equal(found.dense().numpy(), want)
        assert blocks.find("model.norm.weight") is None


@pytest.mark.usefixtures("own_cache")
def test_an_8_bit_file_runs_as_it_is(tmp_path: Path) -> None:
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny), Type.Q8_0)
    prompts = [[3, 5, 7], list(range(10, 40)), [9]]
    answers, facts = [], []
    for quantization in ("none", "auto"):
        with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16", quantization=quantization) as run:
            answers.append(run.generate(prompts, 6, logits=True))
            facts.append(run.core.ready.model)
    assert "Q8_0 blocks are kept as they are" in " ".join(facts[1].notes)
    assert facts[1].weights_bytes < facts[0].weights_bytes
    for plain, kept in zip(*answers, strict=True):
        want, got = (one.logits[0] - one.logits[0].mean() for one in (plain, kept))
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


@needs_int4
@pytest.mark.parametrize(
    ("options", "copied"), [({}, False), ({"quantization": "int4"}, False), ({"enforce_eager": True}, True)]
)
@pytest.mark.usefixtures("own_cache")
def test_a_4_bit_file_runs_as_it_is(options: dict[str, Any], copied: bool, tmp_path: Path) -> None:
    """Compiled kernels take any number of rows; torch's are slow with many, a dense copy serves those."""
    tiny = families()["llama"]
    model = random_model(tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny, model, Type.Q4_1)
    prompts = [[3, 5, 7], list(range(10, 40)), [9]]
    with EngineRun(tmp_path / "tiny.gguf", dtype="float32") as run:
        exact = run.generate(prompts, 6, logits=True)
    with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16", quantization="none") as run:
        dense = run.generate(prompts, 6, logits=True)
        dense_bytes = run.core.ready.model.weights_bytes
    with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16", **options) as run:
        kept = run.generate(prompts, 6, logits=True)
        facts = run.core.ready.model
    assert "kept as they are" in " ".join(facts.notes)
    assert "decoded to plain" not in " ".join(facts.notes)
    assert ("A copy in bfloat16" in " ".join(facts.notes)) == copied
    assert (facts.weights_bytes > dense_bytes) == copied
    for want, plain, got in zip(exact, dense, kept, strict=True):  # the first logits: those of the same text
        first = want.logits[0] - want.logits[0].mean()
        error, usual = (np.linalg.norm(one.logits[0] - one.logits[0].mean() - first) for one in (got, plain))
        assert error < 2.5 * usual + 0.01 * np.linalg.norm(first)


@needs_int4
@pytest.mark.usefixtures("own_cache")
def test_a_processor_without_bfloat16_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit blocks stay, without a dense copy that would be slow; everything else is float32 there."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    tiny = families()["llama"]
    path, gemma, plain = tmp_path / "tiny.gguf", tmp_path / "gemma.gguf", tmp_path / "plain.gguf"
    write_gguf(path, tiny, random_model(tiny), Type.Q4_1)
    write_gguf(plain, tiny, random_model(tiny), Type.Q8_0)
    write_gguf(gemma, families()["gemma"], random_model(families()["gemma"]), Type.Q4_0)

    def loaded(path: Path, **options: object) -> tuple[str, str, bool]:
        with EngineRun(path, dtype="auto", **options) as run:
            run.generate([[3, 5, 7]], 2)
            facts = run.core.ready.model
        return facts.implementation, facts.dtype, "4-bit" in " ".join(facts.notes)

    assert loaded(path) == ("fused", "bfloat16", True)
    assert loaded(path, quantization="none") == ("fused", "float32", False)
    assert loaded(path, implementation="transformers") == ("transformers", "float32", False)
    assert loaded(plain) == ("fused", "float32", False)
    assert loaded(plain, quantization="int4") == ("fused", "bfloat16", True)
    assert loaded(gemma) == ("transformers", "float32", False)
    with EngineRun(path, dtype="bfloat16") as run:
        assert "A copy in bfloat16" not in " ".join(run.core.ready.model.notes)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert loaded(path) == ("fused", "float32", False)


@needs_int4
@pytest.mark.usefixtures("own_cache")
def test_what_a_4_bit_file_holds_otherwise_is_said(tmp_path: Path) -> None:
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny), Type.Q5_0)
    with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16") as run:
        assert "Q5_0 weights are decoded to plain numbers" in " ".join(run.core.ready.model.notes)
    with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16", quantization="int4") as run:
        assert "weights were rounded to 4 bits" in " ".join(run.core.ready.model.notes)


@needs_int4
@pytest.mark.usefixtures("own_cache")
def test_an_output_layer_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits are made from the file's 8 bits, many from a dense copy; quantization="int4" does without the copy."""
    found: list[Linear] = []
    head = GroupScheme.head

    def note(self: GroupScheme, name: str, read: Callable[[], torch.Tensor]) -> Linear:
        found.append(head(self, name, read))
        return found[-1]

    monkeypatch.setattr(GroupScheme, "head", note)
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny), Type.Q4_1, head=Type.Q8_0)
    answers = []
    for quantization in ("auto", "int4"):
        with EngineRun(tmp_path / "tiny.gguf", dtype="bfloat16", quantization=quantization) as run:
            answers.append([one.token_ids for one in run.generate([[3, 5, 7]] * 6, 6)])
    both, alone = found
    assert isinstance(both, RowsLinear)
    assert isinstance(both.few, GroupLinear)
    assert isinstance(alone, GroupLinear)
    x = torch.randn(4, 64).bfloat16()
    assert both(x).dtype == torch.float32
    assert torch.equal(both(x), alone(x))


@needs_int8
@needs_int4
@pytest.mark.parametrize("family", ["llama-biases", "qwen3", "phi3-partial"])
def test_rounded_at_load(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save_fused_family(family, tmp_path / "model")
    prompt = [[5, 17, 80, 3, 44, 9, 61]]
    logits, sizes = {}, {}
    for kind in ("none", "int8", "int4"):
        with EngineRun(folder, dtype="bfloat16", quantization=kind) as run:
            logits[kind] = run.generate(prompt, 1, logits=True)[0].logits[0]
            sizes[kind] = run.core.ready.model.weights_bytes
    assert sizes["none"] > sizes["int8"] > sizes["int4"]
    spread = np.linalg.norm(logits["none"] - logits["none"].mean())
    off = {kind: np.linalg.norm((found := logits[kind] - logits["none"]) - found.mean()) for kind in ("int8", "int4")}
    assert off["int8"] < 0.2 * spread
    assert off["int8"] < off["int4"] < 1.0 * spread


@needs_int4
def test_the_form_is_chosen_by_rows() -> None:
    weight = torch.randn(64, 64)
    scheme = GroupScheme(lambda _: None, rounds=True, copies=Copies(layers=True))
    pair = scheme.linear(["w"], None, lambda: weight.bfloat16(), None)
    assert isinstance(pair, RowsLinear)
    x = torch.randn(FEW_ROWS + 1, 64).bfloat16()
    assert torch.equal(pair(x[:FEW_ROWS]), pair.few(x[:FEW_ROWS]))
    assert torch.equal(pair(x), pair.many(x))
    assert pair.nbytes == pair.few.nbytes + pair.many.nbytes
    odd = GroupScheme(lambda _: None, rounds=True, copies=Copies())
    assert odd.linear(["w"], None, lambda: torch.randn(50, 64).bfloat16(), None).kind != "4-bit"
    assert odd.kept_dense == ["w"]


@needs_packing
def test_dense_weights_take_the_measured_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(256, 256).bfloat16()
    linear = DenseScheme().linear(["w"], None, lambda: weight, None)
    assert isinstance(linear, PackedLinear | PlainLinear)
    assert distance(linear, weight.float(), None, 3) < 5e-3
    monkeypatch.setattr(kernel_choice, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(kernel_choice, "fastest", lambda linears, *_: len(linears) - 1)
    assert isinstance(DenseScheme().linear(["w"], None, lambda: weight, None), PlainLinear)
    monkeypatch.setattr(kernel_choice, "multiplies_bfloat16", lambda device: False)  # then nothing is measured
    assert isinstance(DenseScheme().linear(["w"], None, lambda: weight, None), PackedLinear)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_4_and_8_bits_without_the_fast_instructions(capability: str) -> None:
    """At that level a kernel is right, or it is not offered."""
    script = (
        "import torch\ntorch.set_num_threads(1)\n"
        "from tests.worker.test_weight_schemes import *\n"
        "weight = torch.randn(64, 96)\n"
        "for rows in (1, 5, 20):\n"
        "    if int4_works():\n"
        "        assert distance(Int4Linear(quantize_int4(weight)), quantize_int4(weight).dense(), None, rows) < 0.01\n"
        "    if int8_works():\n"
        "        assert distance(Int8Linear(weight), weight, None, rows) < 0.02\n"
        "print(int4_works(), int8_works())"
    )
    level = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": "AVX2" if capability == "avx2" else "SSE41"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=os.environ | level)
