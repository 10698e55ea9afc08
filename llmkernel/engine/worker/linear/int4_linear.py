"""Int4Linear: 4-bit groups on torch's own kernel, where there are no compiled ones.

It wants w = scale * (code - 8) + zero, with scale and zero in bfloat16: GGUF's float16 scales are rounded to it.
"""

import functools

import torch

from llmkernel.engine.worker.linear.group_weight import GROUP, GroupWeight, quantize_int4
from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["Int4Linear", "int4_works"]


class Int4Linear(Linear):
    """bfloat16 activations on the CPU; needs int4_works() and a multiple of 16 rows. 5 bits per weight."""

    kind = "4-bit"

    def __init__(self, weight: GroupWeight, bias: torch.Tensor | None = None) -> None:
        zeros = weight.lowest() + 8 * weight.scales
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self._scales = torch.stack((weight.scales.t(), zeros.t()), -1).bfloat16().contiguous()
        self._bias = bias
        self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.nbytes = self._codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x, self._codes, GROUP, self._scales)
        return product if self._bias is None else product.add_(self._bias)


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
