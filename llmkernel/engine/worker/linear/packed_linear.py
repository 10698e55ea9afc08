"""PackedLinear: bfloat16 in oneDNN's own order of memory, packed once: the same bits as torch's product, faster."""

import functools

import torch
from torch.nn import functional

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["PackedLinear", "packing_works"]


class PackedLinear(Linear):
    """weight [out, in] bfloat16 on the CPU; the caller may drop it afterwards. Needs packing_works()."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.kind = "bfloat16, packed"
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def address(self) -> int | None:
        """Of the packed numbers; None where this torch does not tell."""
        try:
            return int(torch.ops.mkldnn.data_ptr(self._packed))
        except (AttributeError, RuntimeError):
            return None

    def packed_bytes(self) -> int:
        """What they take; needs an address()."""
        return int(torch.ops.mkldnn._nbytes(self._packed))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._packed, self.bias, "none", [], "")


@functools.cache
def packing_works() -> bool:
    """Whether torch has these private operations, oneDNN takes bfloat16 here, and the product is right."""
    try:
        weight, x = torch.linspace(-1, 1, 64 * 32).bfloat16().view(64, 32), torch.linspace(-2, 2, 32).bfloat16()[None]
        product = PackedLinear(weight)(x)
    except (AttributeError, RuntimeError, TypeError):  # a torch or a processor without them
        return False
    return torch.allclose(product.float(), functional.linear(x, weight).float(), atol=0.05)
