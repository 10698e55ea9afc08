"""Weights in groups of 4 and 8 bits on compiled kernels, against the same product written out."""

import os
import subprocess
import sys

import pytest
import torch

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled.kernels import compile_kernels
from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.linear.group_linear import GroupLinear
from llmkernel.engine.worker.linear.group_weight import GROUP, GroupWeight

FORMS = [(4, False), (4, True), (8, False)]


def products() -> Products:
    layer = LayerSpec(index=0, num_heads=1, num_kv_heads=1, key_size=16, value_size=16, scaling=0.25)
    kernels, note = compile_kernels([layer], torch.bfloat16, torch.device("cpu"))
    assert kernels is not None, note
    assert kernels.products is not None
    return kernels.products


def random_weight(bits: int, minima: bool, outer: int, inner: int) -> GroupWeight:
    """With every code, and scales that float16 has."""
    generator = torch.Generator().manual_seed(outer + inner)
    groups = outer, inner // GROUP
    codes = torch.randint(0, 2**bits, (outer, inner), dtype=torch.uint8, generator=generator)
    codes.view(-1)[:4] = torch.tensor([0, 2**bits - 1, 0, 2 ** (bits - 1)])
    scales, lowest = (torch.randn(groups, generator=generator).div(2**bits).half().float() for _ in range(2))
    return GroupWeight(bits, codes, scales, lowest * 8 if minima else None)


def distance(linear: GroupLinear, weight: GroupWeight, bias: torch.Tensor | None, rows: int) -> float:
    """Relative to the largest number of the product."""
    x = torch.randn(rows, weight.codes.shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
    want = x.double() @ weight.dense().double().t() + (0 if bias is None else bias.double())
    return float((linear(x).double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("bits", "minima"), FORMS)
@pytest.mark.parametrize(("outer", "inner"), [(64, 32), (192, 64), (200, 96), (8, 32), (576, 1536)])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_rows(bits: int, minima: bool, outer: int, inner: int, threads: int) -> None:
    torch.set_num_threads(threads)
    weight = random_weight(bits, minima, outer, inner)
    linear = GroupLinear(weight, None, products(), float_out=True)
    for rows in (1, 2, 3, 4, 7, 130):
        assert distance(linear, weight, None, rows) < 1e-5
    assert linear(torch.empty(0, inner).bfloat16()).shape == (0, outer)


@pytest.mark.parametrize(("bits", "minima"), FORMS)
def test_biases_and_bfloat16(bits: int, minima: bool) -> None:
    weight, bias = random_weight(bits, minima, 100, 64), torch.randn(100).bfloat16()
    linear = GroupLinear(weight, bias, products())
    for rows in (1, 6):
        assert distance(linear, weight, bias, rows) < 5e-3
    assert linear(torch.zeros(2, 64).bfloat16()).equal(bias.expand(2, 100))


def test_bits_per_weight() -> None:
    sizes = [GroupLinear(random_weight(*form, 128, 64), None, products()).nbytes * 8 / (128 * 64) for form in FORMS]
    assert sizes == [4.5, 5.0, 8.5]


def test_a_row_that_is_not_finite_stays_alone() -> None:
    linear = GroupLinear(random_weight(4, False, 64, 64), None, products())
    x = torch.randn(6, 64).bfloat16()
    want = linear(x)
    x[2, 7] = torch.inf
    got = linear(x)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("joined", [(4, 4), (8, 8)])
def test_rows_and_joins(joined: tuple[int, int]) -> None:
    parts = [random_weight(bits, bits == 4 and index == 0, 32, 64) for index, bits in enumerate(joined)]
    whole = GroupWeight.join(parts)
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    order = torch.randperm(64)
    assert torch.equal(whole.rows(order).dense(), whole.dense()[order])


@pytest.mark.parametrize("level", ["avx512f", "avx2"])
def test_a_processor_that_does_not_multiply_pairs(level: str) -> None:
    """The same kernels for fewer instructions, in a process of its own."""
    script = (
        "from llmkernel.engine.worker.compiled import machine\n"
        "name, features = machine.processor()\n"
        "def without(feature):\n"
        f"    return feature[1:7] == 'avx512' and ('{level}' == 'avx2' or 'bf16' in feature)\n"
        "kept = ['-' + one[1:] if without(one) else one for one in features.split(',')]\n"
        "machine.processor = lambda: ('haswell', ','.join(kept))\n"
        "from tests.worker.test_group_linear import *\n"
        "assert not machine.multiplies_pairs()\n"
        "for bits, minima in FORMS:\n"
        "    weight = random_weight(bits, minima, 200, 96)\n"
        "    for rows in (1, 2, 3, 9, 21):\n"
        "        assert distance(GroupLinear(weight, None, products(), float_out=True), weight, None, rows) < 1e-5\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, env=os.environ)


@pytest.mark.parametrize("setting", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}])
def test_fewer_threads_than_torch_believes(setting: dict[str, str]) -> None:
    """No output is left to a thread that does not come."""
    script = (
        "from tests.worker.test_group_linear import *\n"
        "torch.set_num_threads(2)\n"
        "weight = random_weight(4, True, 200, 96)\n"
        "linear = GroupLinear(weight, None, products(), float_out=True)\n"
        "for rows in (1, 9):\n"
        "    assert distance(linear, weight, None, rows) < 1e-5\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, env=os.environ | setting)
