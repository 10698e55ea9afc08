"""Products with weights in panels, by compiled kernels."""

from typing import NamedTuple

import torch

from llmkernel.engine.worker.compiled.arguments import OPENED_FORMS, PANEL, UNIT_INPUTS, ProductArguments
from llmkernel.engine.worker.compiled.team import Kernel, Scratch, Team
from llmkernel.engine.worker.hardware import has_tiles

__all__ = ["KernelError", "PanelWeight", "Products"]

_WIDENED_ROWS = 256
"""Rows that are multiplied at once where inputs are widened."""


class KernelError(Exception):
    """A kernel could not be compiled or loaded here."""


class PanelWeight(NamedTuple):
    """A weight [outer, inner] in panels of so many units at this address, multiplied by `kernel`.

    bias: address of bfloat16 [outer], or 0. widened: inputs that the kernel keeps in float32, of a row. opened: inputs
    whose codes it makes numbers, of a panel. float_out: the product is not rounded to bfloat16.
    """

    kernel: Kernel
    address: int
    inner: int
    units: int
    outer: int
    bias: int
    widened: int
    opened: int
    float_out: bool = False


class Products:
    """Owns their scratch. most_rows: up to which they are faster than oneDNN's with the same bfloat16 weights."""

    def __init__(self, team: Team) -> None:
        from llmkernel.engine.worker.compiled.machine import multiplies_pairs  # imports LLVM, which may be missing

        self._team = team
        self._arguments = ProductArguments()
        self._scratch = Scratch()
        self._widens = not multiplies_pairs()
        self.most_rows = 2 if self._widens or has_tiles() else 128

    def weight(
        self, form: str, address: int, shape: tuple[int, int], bias: torch.Tensor | None, *, float_out: bool = False
    ) -> PanelWeight:
        """Of a weight [outer, inner] in this form (panels.FORMS); its first one on a machine takes a second or two.

        KernelError where there is no kernel for it.
        """
        from llmkernel.engine.worker.compiled.library import open_library, product_recipe

        outer, inner = shape
        try:
            kernel = open_library(product_recipe(form)).kernel("product")
        except Exception as error:  # whatever keeps LLVM from it here
            raise KernelError(f"{type(error).__name__}: {error}") from error
        bias_address = 0 if bias is None else bias.data_ptr()
        widened = inner if self._widens else 0
        opened = inner if form in OPENED_FORMS else 0
        units = inner // UNIT_INPUTS[form]
        return PanelWeight(kernel, address, inner, units, outer, bias_address, widened, opened, float_out)

    def __call__(self, x: torch.Tensor, weight: PanelWeight) -> torch.Tensor:
        """x bfloat16 [rows, inner], contiguous, a row at least -> [rows, outer], bfloat16 or float32."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == weight.inner
        out = x.new_empty(x.shape[0], weight.outer, dtype=torch.float32 if weight.float_out else torch.bfloat16)
        if self._widens:  # what is widened is kept by each thread
            for given, into in zip(x.split(_WIDENED_ROWS), out.split(_WIDENED_ROWS), strict=True):
                self._multiply(given, weight, into)
        else:
            self._multiply(x, weight, out)
        return out

    def _multiply(self, x: torch.Tensor, weight: PanelWeight, out: torch.Tensor) -> None:
        rows, arguments = x.shape[0], self._arguments
        size = ProductArguments.scratch_for(rows, weight.units, weight.widened, weight.opened)
        arguments.rows, arguments.units, arguments.outer = rows, weight.units, weight.outer
        arguments.x, arguments.weights, arguments.bias = x.data_ptr(), weight.address, weight.bias
        arguments.out, arguments.float_out = out.data_ptr(), int(weight.float_out)
        arguments.scratch, arguments.scratch_size = self._scratch.address(size), size
        self._team.run(weight.kernel, arguments, parts=2 * weight.outer // PANEL)
