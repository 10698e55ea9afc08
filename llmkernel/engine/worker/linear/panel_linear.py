"""PanelLinear: a packed bfloat16 weight, for a few rows multiplied by a compiled kernel where oneDNN has put it."""

import ctypes

import numpy as np
import torch

from llmkernel.engine.worker.compiled.arguments import PANEL, UNIT_INPUTS
from llmkernel.engine.worker.compiled.products import PanelWeight, Products
from llmkernel.engine.worker.linear.linear import Linear
from llmkernel.engine.worker.linear.packed_linear import PackedLinear

__all__ = ["PanelLinear"]

_FORM = "bfloat16"


class PanelLinear(Linear):
    """`many` for more rows than the kernels are faster for; both read the same memory."""

    def __init__(self, many: PackedLinear, panels: PanelWeight, products: Products) -> None:
        self.kind = many.kind
        self.nbytes = many.nbytes
        self.panels = panels
        self.most_panel_rows = products.most_rows
        self._many = many
        self._products = products

    @classmethod
    def of(
        cls, packed: PackedLinear, weight: torch.Tensor, products: Products, *, float_out: bool = False
    ) -> "PanelLinear | None":
        """None where oneDNN has packed `weight` [out, in] in another order than the kernels read.

        Its order is its own affair, so it is looked at: the first and the last panel, number by number.
        float_out: products of a few rows stay in float32.
        """
        outer, inner = weight.shape
        address = packed.address()
        if outer % PANEL or inner % UNIT_INPUTS[_FORM] or address is None or packed.packed_bytes() != weight.nbytes:
            return None
        for first in (0, outer - PANEL):
            expected = weight[first : first + PANEL].view(PANEL, -1, 2).transpose(0, 1).contiguous().view(torch.int16)
            place = address + first * inner * weight.itemsize
            found = np.ctypeslib.as_array((ctypes.c_int16 * expected.numel()).from_address(place))
            if not np.array_equal(found, expected.numpy().ravel()):
                return None
        panels = products.weight(_FORM, address, (outer, inner), packed.bias, float_out=float_out)
        return cls(packed, panels, products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.panels is not None
        return self._products(x, self.panels) if 0 < x.shape[0] <= self.most_panel_rows else self._many(x)
