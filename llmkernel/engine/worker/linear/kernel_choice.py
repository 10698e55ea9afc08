"""dense_kernel: which form of a dense weight is fastest here, measured on a real weight within a tenth of a second."""

import time
from collections.abc import Callable, Sequence

import torch

from llmkernel.engine.worker.hardware import multiplies_bfloat16
from llmkernel.engine.worker.linear.linear import Linear, PlainLinear
from llmkernel.engine.worker.linear.packed_linear import PackedLinear, packing_works

__all__ = ["MakeLinear", "dense_kernel", "fastest"]

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""(weight [out, in], bias or None) -> Linear."""

_ROWS = (1, 16)
_SECONDS = 0.1


def dense_kernel(sample: torch.Tensor) -> MakeLinear:
    """The constructor to use for weights like `sample` (of the final dtype, on the final device).

    Measured only where the forms give the same bits. Without instructions for bfloat16 they part in the last ones, for
    some numbers of rows and threads, and are equally fast: a measurement could fall out otherwise at the next load, and
    the same seed give another text.
    """
    if sample.device.type != "cpu" or sample.dtype != torch.bfloat16 or not packing_works():
        return PlainLinear
    if not multiplies_bfloat16(sample.device):
        return PackedLinear
    kernels: list[MakeLinear] = [PackedLinear, PlainLinear]
    return kernels[fastest([kernel(sample, None) for kernel in kernels], sample.shape[1], sample.dtype)]


def fastest(linears: Sequence[Linear], size: int, dtype: torch.dtype, rows: Sequence[int] = _ROWS) -> int:
    """Index of the fastest, the earlier one when in doubt. Best times count, in turns: load disturbs all alike."""
    inputs = [torch.ones(count, size, dtype=dtype) for count in rows]
    best = _best_times(linears, inputs, _SECONDS)
    totals = [sum(time / first for time, first in zip(times, best[0], strict=True)) for times in best]
    return min(range(len(totals)), key=lambda index: (totals[index] * (1 if index == 0 else 1.05), index))


def _best_times(linears: Sequence[Linear], inputs: Sequence[torch.Tensor], seconds: float) -> list[list[float]]:
    """Per Linear and input, its best time in seconds."""
    best = [[float("inf")] * len(inputs) for _ in linears]
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or (time.perf_counter() < until and rounds < 50):
        for linear, times in zip(linears, best, strict=True):
            for index, x in enumerate(inputs):
                started = time.perf_counter()
                linear(x)
                times[index] = min(times[index], time.perf_counter() - started)
        rounds += 1
    return best
