"""Int4Linear: groups of 32 weights as w = scale * (code - 8) + zero, codes 0 to 15, on torch's own 4-bit kernel.

GGUF's Q4_0 and Q4_1 blocks are such groups: their codes are kept exactly, their float16 scales are rounded to bfloat16.
"""

import dataclasses
import functools

import torch

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["GROUP", "Int4Linear", "Int4Weight", "int4_works", "quantize_int4"]

GROUP = 32


@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """codes: uint8 [out, in]. scales, zeros: float32 [out, in / GROUP]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def rows(self, order: torch.Tensor) -> "Int4Weight":
        """Its rows in another order."""
        return Int4Weight(*(part.index_select(0, order) for part in (self.codes, self.scales, self.zeros)))

    def dense(self) -> torch.Tensor:
        """The weight that it stands for, float32 [out, in]."""
        grouped = self.codes.float().unflatten(1, (-1, GROUP)) - 8
        return (grouped * self.scales[..., None] + self.zeros[..., None]).flatten(1)

    @staticmethod
    def join(parts: "list[Int4Weight]") -> "Int4Weight":
        """One below the other."""
        codes, scales, zeros = zip(*((part.codes, part.scales, part.zeros) for part in parts), strict=True)
        return Int4Weight(torch.cat(codes), torch.cat(scales), torch.cat(zeros))


class Int4Linear(Linear):
    """bfloat16 activations on the CPU; needs int4_works() and a multiple of 16 rows. 5 bits per weight."""

    kind = "4-bit"

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self._scales = torch.stack((weight.scales.t(), weight.zeros.t()), -1).bfloat16().contiguous()
        self._bias = bias
        self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.nbytes = self._codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x, self._codes, GROUP, self._scales)
        return product if self._bias is None else product.add_(self._bias)


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """Round each group of a row [out, in] to 16 steps between its least and its greatest weight."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny).bfloat16().float()
    codes = ((grouped - low[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return Int4Weight(codes.to(torch.uint8).flatten(1), scales, low + 8 * scales)


@functools.cache
def int4_works() -> bool:
    """Whether torch has the 4-bit kernel for bfloat16, and it multiplies as it should."""
    try:
        weight = quantize_int4(torch.linspace(-1, 1, 32 * 64).view(32, 64))
        x = torch.linspace(-2, 2, 64).bfloat16()[None]
        product = Int4Linear(weight)(x)
    except (AttributeError, RuntimeError, TypeError):  # a torch or a processor without it
        return False
    return torch.allclose(product.float(), x.float() @ weight.dense().t(), atol=0.3)
