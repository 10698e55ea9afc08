"""Int8Linear: a scale per row, w = scale * code, on torch's own 8-bit kernel (weights only; activations stay)."""

import functools

import torch

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["Int8Linear", "int8_works"]


class Int8Linear(Linear):
    """weight [out, in] of any float type, rounded here. bfloat16 activations on the CPU; needs int8_works()."""

    kind = "8-bit"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
        self._codes = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self._scales = scales
        self._bias = bias
        self._product = torch.ops.aten._weight_int8pack_mm.default
        self.nbytes = self._codes.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x, self._codes, self._scales)
        return product if self._bias is None else product.add_(self._bias)


@functools.cache
def int8_works() -> bool:
    """Whether torch has the 8-bit kernel for bfloat16, and it multiplies as it should."""
    try:
        weight = torch.linspace(-1, 1, 32 * 64).view(32, 64)
        x = torch.linspace(-2, 2, 64).bfloat16()[None]
        product = Int8Linear(weight)(x)
    except (AttributeError, RuntimeError, TypeError):  # a torch or a processor without it
        return False
    return torch.allclose(product.float(), x.float() @ weight.t(), atol=0.5)
