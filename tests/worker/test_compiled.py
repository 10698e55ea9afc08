"""The compiled kernels against the same written out: norms, gates, attention of decodes and short chunks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled import build, library
from llmkernel.engine.worker.compiled.kernels import CompiledKernels, compile_kernels
from llmkernel.engine.worker.kv_store import PagedKVStore
from llmkernel.engine.worker.linear.packed_linear import PackedLinear, packing_works
from llmkernel.engine.worker.linear.panel_linear import PanelLinear
from llmkernel.engine.worker.models.heads import HeadNorms, Heads
from llmkernel.engine.worker.models.operations import RMSNorm, TorchOperations
from llmkernel.engine.worker.models.rotary import Rotary, RotaryConfig
from llmkernel.engine.worker.paged_attention import PagedAttention
from llmkernel.engine.worker.scheduled_tokens import ScheduledTokens, attention_order
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
PLAIN = LayerSpec(index=0, num_heads=6, num_kv_heads=2, key_size=16, value_size=16, scaling=0.25)


def kernels_for(layer: LayerSpec, dtype: torch.dtype) -> CompiledKernels:
    kernels, note = compile_kernels([layer], dtype, CPU)
    assert kernels is not None, note
    return kernels


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to the size of what is wanted."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-9))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 577), (3, 64), (70, 576)])
def test_the_residual_and_its_norm(rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    hidden = torch.randn(rows, size, generator=generator) * 3
    added = torch.randn(rows, size, generator=generator).to(dtype)
    norm = RMSNorm(torch.rand(size, generator=generator) + 0.5, 1e-5, dtype)
    ours, theirs = hidden.clone(), hidden.clone()
    kernels = kernels_for(PLAIN, dtype)
    for more, scale in ((None, 1.0), (added, 1.0), (added, 0.22)):
        got, want = kernels.norm(norm, ours, more, scale), TorchOperations().norm(norm, theirs, more, scale)
        assert got.dtype == want.dtype == dtype
        assert distance(got, want) < TOLERANCE[dtype]
        assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 301), (40, 1536)])
def test_the_gate(rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    joined = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 30).to(dtype)
    gate, up = joined.double().chunk(2, -1)
    got = kernels_for(PLAIN, dtype).gate(joined)
    assert distance(got, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.skipif(not packing_works(), reason="oneDNN packs no bfloat16 here")
@pytest.mark.parametrize(("outer", "inner"), [(64, 32), (192, 64), (576, 1536)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_few_rows(outer: int, inner: int, biased: bool, threads: int) -> None:
    generator = torch.Generator().manual_seed(outer)
    weight = torch.randn(outer, inner, generator=generator).bfloat16()
    bias = torch.randn(outer, generator=generator).bfloat16() if biased else None
    products = kernels_for(PLAIN, torch.bfloat16).products
    assert products is not None
    linear = PanelLinear.of(PackedLinear(weight, bias), weight, products)
    if linear is None:
        pytest.skip("oneDNN packs in another order here")
    assert linear(torch.empty(0, inner).bfloat16()).shape == (0, outer)
    for rows in (1, 2, 3, 6, 130):  # the last one beyond what the kernels take
        x = torch.randn(rows, inner, generator=generator).bfloat16()
        want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert distance(linear(x), want) < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not packing_works(), reason="oneDNN packs no bfloat16 here")
def test_logits_of_a_few_rows_are_not_rounded(threads: int) -> None:
    weight, x = torch.randn(192, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    products = kernels_for(PLAIN, torch.bfloat16).products
    assert products is not None
    linear = PanelLinear.of(PackedLinear(weight), weight, products, float_out=True)
    if linear is None:
        pytest.skip("oneDNN packs in another order here")
    assert linear(x).dtype == torch.float32
    assert distance(linear(x), x.double() @ weight.double().t()) < 2e-6


@pytest.mark.skipif(not packing_works(), reason="oneDNN packs no bfloat16 here")
def test_an_order_of_weights_that_is_not_known_is_left_to_onednn() -> None:
    products = kernels_for(PLAIN, torch.bfloat16).products
    assert products is not None
    weight = torch.randn(128, 64).bfloat16()
    packed = PackedLinear(weight)
    assert PanelLinear.of(packed, weight.flip(0), products) is None  # not the order of this weight
    odd = torch.randn(100, 64).bfloat16()
    assert PanelLinear.of(PackedLinear(odd), odd, products) is None


def test_a_row_that_is_not_finite_stays_alone() -> None:
    joined = torch.ones(3, 64)
    joined[1, 5] = torch.nan
    kernels = kernels_for(PLAIN, torch.float32)
    assert kernels.gate(joined).isfinite().all(1).tolist() == [True, False, True]
    hidden = torch.ones(3, 32)
    hidden[0, 3], hidden[2, 3] = torch.inf, torch.nan
    normed = kernels.norm(RMSNorm(torch.ones(32), 1e-5, torch.float32), hidden, None, 1.0)
    assert normed.isfinite().all(1).tolist() == [False, True, False]


@dataclasses.dataclass
class Case:
    """Attention of some steps, compiled and by torch's operations, each in a pool of its own."""

    layer: LayerSpec
    dtype: torch.dtype = torch.float32
    block_size: int = 4
    rotary: int = 16
    normed: bool = False

    def run(self, steps: Sequence[Sequence[int]]) -> float:
        """steps: tokens of each request (0: none) in each step. The largest distance between the two."""
        generator = torch.Generator().manual_seed(0)
        layer, size = self.layer, self.block_size
        count = len(steps[0])
        blocks = -(-max(sum(step[i] for step in steps) for i in range(count)) // size)
        order = torch.randperm(count * blocks, generator=generator).numpy() + 1
        tables = order.reshape(count, blocks)
        weight = torch.rand(layer.num_heads + layer.num_kv_heads, layer.key_size, generator=generator) + 0.5
        rotary = Rotary(RotaryConfig(size=self.rotary, theta=1e4, max_position=4096), CPU)
        heads = Heads(layer, rotary, HeadNorms(weight, 1e-6) if self.normed else None)
        stores = [
            PagedKVStore([layer], num_blocks=1 + count * blocks, block_size=size, dtype=self.dtype, device=CPU)
            for _ in range(2)
        ]
        computed, worst = [0] * count, 0.0
        for step in steps:
            due = [i for i in range(count) if step[i]]
            tokens = [ScheduledTokens(step[i], computed[i], tables[i]) for i in due]
            tokens = [tokens[place] for place in attention_order(tokens)]
            rows = sum(sequence.num_tokens for sequence in tokens)
            width = layer.num_heads * layer.key_size + layer.row_size
            joined = torch.randn(rows, width, generator=generator).to(self.dtype)
            positions = np.concatenate([np.arange(one.num_computed, one.context) for one in tokens])
            rotation = rotary(torch.from_numpy(positions))
            outs = []
            for store, kernels in zip(stores, (kernels_for(layer, self.dtype), None), strict=True):
                context = PagedAttention(store, {0: layer}, tokens, dtype=self.dtype, device=CPU, kernels=kernels)
                outs.append(context.attend_joined(heads, joined.clone(), rotation).clone())
                assert context.num_calls == 1
            worst = max(worst, distance(*outs))
            for i in due:
                computed[i] += step[i]
        return worst


@given(
    steps=st.lists(st.lists(st.sampled_from([0, 1, 1, 1, 3, 9, 40]), min_size=3, max_size=3), min_size=1, max_size=9)
)
@settings(max_examples=40, deadline=None)
def test_any_mix_of_steps(steps: list[list[int]]) -> None:
    steps = [step for step in steps if any(step)]
    if steps:
        assert Case(PLAIN).run(steps) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block_size": 16},
        {"block_size": 32},
        {"rotary": 6},
        {"normed": True},
        {"layer": dataclasses.replace(PLAIN, window=9)},
        {"layer": dataclasses.replace(PLAIN, window=300), "block_size": 16},
        {"layer": dataclasses.replace(PLAIN, num_kv_heads=6)},
        {"layer": dataclasses.replace(PLAIN, num_kv_heads=1)},
        {"layer": dataclasses.replace(PLAIN, key_size=10, value_size=10), "rotary": 10},
    ],
    ids=lambda change: ",".join(change) or "plain",
)
def test_kinds_of_layers(change: dict[str, object], dtype: torch.dtype, threads: int) -> None:
    """Texts longer than the keys that are looked at together, ragged, with drafts."""
    case = Case(**{"layer": PLAIN, "dtype": dtype, **change})  # type: ignore[arg-type]
    assert (
        case.run([[700, 30, 3], [1, 1, 1], [4, 1, 2], [1, 16, 1], [1, 0, 1]])
        < {
            torch.float32: 1e-5,
            torch.bfloat16: 0.03,
        }[dtype]
    )


def test_what_lies_behind_the_end_is_not_read() -> None:
    """A clean block, and one that another text left full of numbers: four keys are read at once, one of them counts."""
    store = PagedKVStore([PLAIN], num_blocks=4, block_size=4, dtype=torch.float32, device=CPU)
    full = store.slots(torch.full((4,), 3), torch.arange(4))
    store.write(0, full, torch.full((4, PLAIN.row_size), 7.0))
    kernels = kernels_for(PLAIN, torch.float32)
    rotary = Rotary(RotaryConfig(size=16, theta=1e4, max_position=64), CPU)
    heads = Heads(PLAIN, rotary)
    joined = torch.randn(1, 6 * 16 + PLAIN.row_size)
    outs = []
    for blocks in ([1, 2], [1, 3]):
        tokens = [ScheduledTokens(1, 4, np.array(blocks))]
        context = PagedAttention(store, {0: PLAIN}, tokens, dtype=torch.float32, device=CPU, kernels=kernels)
        outs.append(context.attend_joined(heads, joined, rotary(torch.tensor([4]))).clone())
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("layer", "dtype", "device", "reason"),
    [
        (PLAIN, torch.float16, CPU, "bfloat16 and float32"),
        (PLAIN, torch.float32, torch.device("meta"), "not for meta"),
        (dataclasses.replace(PLAIN, softcap=30.0), torch.float32, CPU, "soft caps"),
        (dataclasses.replace(PLAIN, value_size=8), torch.float32, CPU, "one even size"),
        (dataclasses.replace(PLAIN, key_size=7, value_size=7), torch.float32, CPU, "one even size"),
    ],
)
def test_what_is_not_compiled_says_why(layer: LayerSpec, dtype: torch.dtype, device: torch.device, reason: str) -> None:
    kernels, note = compile_kernels([layer], dtype, device)
    assert kernels is None
    assert reason in note


def test_code_is_kept_and_its_loss_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    recipe = library.decoder_recipe("float32", 16)

    def count(recipe: library.Recipe) -> bytes:
        built.append(recipe)
        return build.build(recipe)

    monkeypatch.setattr(library, "build_code", count)
    folder = tmp_path / "compiled"
    for _ in range(2):
        library.KernelLibrary(folder, recipe)
    assert built == [recipe]
    (kept,) = folder.iterdir()
    assert kept.stat().st_mode & 0o77 == 0
    (tmp_path / "file").write_text("")
    library.KernelLibrary(tmp_path / "file", recipe)  # a folder that cannot be made
    assert len(built) == 2


def test_it_can_be_left_out(tmp_path: Path) -> None:
    folder = tiny_models.save_family("llama", tmp_path / "llama")
    answers, notes = [], []
    for eager in (False, True):
        with EngineRun(folder, dtype="float32", enforce_eager=eager) as run:
            notes.append(" ".join(run.core.ready.model.notes))
            answers.append(run.generate([[5, 6, 7]], max_tokens=12)[0].token_ids)
    assert answers[0] == answers[1]
    assert "compiled." in notes[0]
    assert "enforce_eager" in notes[1]
    assert EngineArgs(enforce_eager=True).enforce_eager


def test_a_prompt_in_chunks_in_bfloat16(tmp_path: Path) -> None:
    """The steps before its last one ask for no logits at all."""
    model = tiny_models.build("llama", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    folder = tiny_models.save(model, tmp_path / "llama")
    prompt = [5, 6, 7] * 20
    with EngineRun(folder, dtype="bfloat16", max_num_batched_tokens=16) as run:
        assert len(run.generate([prompt], max_tokens=5)[0].token_ids) == 5


def test_without_numba_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: library.Recipe) -> None:
        raise ImportError("No module named 'numba'")

    monkeypatch.setattr(library, "open_library", refuse)
    kernels, note = compile_kernels([PLAIN], torch.float32, CPU)
    assert kernels is None
    assert "decoding is slower: ImportError: No module named 'numba'" in note


def test_a_product_that_cannot_be_compiled_leaves_all_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = library.open_library

    def refuse(recipe: library.Recipe) -> library.KernelLibrary:
        if recipe[0] == "product":
            raise ImportError("Numba needs NumPy 9 or less")
        return opened(recipe)

    monkeypatch.setattr(library, "open_library", refuse)
    model = tiny_models.build("llama", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    with EngineRun(tiny_models.save(model, tmp_path / "llama"), dtype="bfloat16", quantization="int4") as run:
        assert "decoding is slower: ImportError: Numba needs" in " ".join(run.core.ready.model.notes)
        assert len(run.generate([[5, 6, 7]], max_tokens=3)[0].token_ids) == 3
