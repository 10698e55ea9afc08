"""RowsLinear: two forms of one weight, chosen by the number of rows of a step. It takes the memory of both."""

import torch

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["FEW_ROWS", "RowsLinear"]

FEW_ROWS = 8
"""Rows up to which torch's 4-bit kernel is faster than a packed dense one on processors with 16-bit dot products.

Fixed, not measured at each load: the form decides the last bits of a logit, and a seed is to give the same text after
every load on a machine.
"""


class RowsLinear(Linear):
    """`few` for up to FEW_ROWS rows, `many` above."""

    def __init__(self, few: Linear, many: Linear) -> None:
        self.kind = f"{few.kind} and {many.kind}"
        self.nbytes = few.nbytes + many.nbytes
        self.few = few
        self.many = many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] <= FEW_ROWS else self.many(x)
