"""Products: a few rows with bfloat16 weights in panels, by compiled kernels."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from llmkernel.engine.worker.compiled.arguments import MOST_ROWS, PANEL, ProductArguments
from llmkernel.engine.worker.compiled.team import Kernel, Scratch, Team

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PanelWeight", "Products"]


class PanelWeight(NamedTuple):
    """A weight [outer, inner] in panels at this address (ProductArguments). bias: address of bfloat16 [outer], or 0.

    float_out: the product is not rounded to bfloat16.
    """

    address: int
    inner: int
    outer: int
    bias: int
    float_out: bool = False


class Products:
    """Owns the kernels and their scratch. kernels: by rows, from 1 on."""

    most_rows = MOST_ROWS

    def __init__(self, kernels: "Sequence[Kernel]", team: Team) -> None:
        self._kernels = kernels
        self._team = team
        self._arguments = ProductArguments()
        self._scratch = Scratch()

    def __call__(self, x: torch.Tensor, weight: PanelWeight) -> torch.Tensor:
        """x bfloat16 [rows, inner], contiguous, of at most most_rows rows -> [rows, outer], bfloat16 or float32."""
        rows = x.shape[0]
        out = x.new_empty(rows, weight.outer, dtype=torch.float32 if weight.float_out else torch.bfloat16)
        arguments = self._arguments
        size = ProductArguments.scratch_for(rows, weight.inner)
        arguments.inner, arguments.outer, arguments.bias = weight.inner, weight.outer, weight.bias
        arguments.x, arguments.weights, arguments.out = x.data_ptr(), weight.address, out.data_ptr()
        arguments.scratch, arguments.scratch_size = self._scratch.address(size), size
        arguments.float_out = int(weight.float_out)
        self._team.run(self._kernels[rows - 1], arguments, parts=2 * weight.outer // PANEL)
        return out
