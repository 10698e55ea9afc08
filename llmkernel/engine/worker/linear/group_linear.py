"""GroupLinear: weights of 4 or 8 bits in groups, exactly as they are, on a compiled kernel."""

import sys

import torch

from llmkernel.engine.worker.compiled.arguments import PANEL
from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.linear.group_weight import GroupWeight
from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["GroupLinear"]

_AT_ONCE = 64 * PANEL
"""Outputs that are put in order together: an output layer would take six times its size meanwhile."""


class GroupLinear(Linear):
    """bfloat16 activations on the CPU, for any number of rows. Q4_0: 4.5 bits per weight, Q4_1: 5, Q8_0: 8.5.

    float_out: products stay in float32.
    """

    def __init__(
        self, weight: GroupWeight, bias: torch.Tensor | None, products: Products, *, float_out: bool = False
    ) -> None:
        self.kind = f"{weight.bits}-bit"
        form = f"{self.kind}-minima" if weight.minima is not None else self.kind
        self._packed = _pack(weight)
        self._bias = bias
        self._products = products
        shape = weight.codes.shape[0], weight.codes.shape[1]
        self.panels = products.weight(form, self._packed.data_ptr(), shape, bias, float_out=float_out)
        self.most_panel_rows = sys.maxsize
        self.nbytes = self._packed.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.panels is not None
        return self._products(x, self.panels) if x.shape[0] else x.new_empty(0, self.panels.outer)


def _pack(weight: GroupWeight) -> torch.Tensor:
    """Its panels: uint8 [panels, groups, bytes of a unit]. Outputs that are missing in the last panel are zeros."""
    whole = []
    for first in range(0, weight.codes.shape[0], _AT_ONCE):
        part = weight.rows(slice(first, first + _AT_ONCE))
        outer, groups = part.scales.shape
        words = _words(part.codes, part.bits).view(outer, groups, -1)
        halves = [one.half() for one in (part.scales, part.minima) if one is not None]
        whole.append(torch.cat([_by_panel(one, -outer % PANEL) for one in (words, *halves)], -1))
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [out, in * bits / 32]: those of a pair of inputs lie 16 bits apart (panels.py)."""
    four = codes.view(torch.int32)  # inputs 0, 1, 2, 3 at bits 0, 8, 16, 24
    if bits == 8:  # at 0, 16, 8, 24
        return (four & ~0xFFFF00) | (four & 0xFF00) << 8 | (four >> 8) & 0xFF00
    # at 0, 16, 4, 20, and of the next four at 8, 24, 12, 28
    four = (four & 0xF) | (four & 0xF00) << 8 | (four >> 12) & 0xF0 | (four >> 4) & 0xF00000
    return four[:, ::2] | four[:, 1::2] << 8


def _by_panel(part: torch.Tensor, missing: int) -> torch.Tensor:
    """[out, groups, ...] -> uint8 [panels, groups, bytes], outputs side by side."""
    if missing:
        part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
    grouped = part.view(-1, PANEL, part.shape[1], *part.shape[2:]).movedim(1, -1)
    return grouped.contiguous().view(torch.uint8).flatten(2)
