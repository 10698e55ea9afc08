"""WeightScheme: how a model's matrices are kept: dense, 8-bit or 4-bit, the last perhaps beside a dense copy."""

from collections.abc import Callable

import torch

from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.linear.int4_linear import GROUP, Int4Linear, Int4Weight, quantize_int4
from llmkernel.engine.worker.linear.int8_linear import Int8Linear
from llmkernel.engine.worker.linear.kernel_choice import MakeLinear, dense_kernel
from llmkernel.engine.worker.linear.linear import Linear
from llmkernel.engine.worker.linear.packed_linear import PackedLinear
from llmkernel.engine.worker.linear.panel_linear import PanelLinear
from llmkernel.engine.worker.linear.rows_linear import RowsLinear

__all__ = ["DenseScheme", "Int4Scheme", "Int8Scheme", "WeightScheme"]

_ROWS = 16
"""torch's 4-bit kernel wants a multiple of so many rows."""

Read = Callable[[], torch.Tensor]


class WeightScheme:
    """The dense scheme: each weight in the form that is fastest here, measured once.

    products: compiled ones, for a few rows; None: the form's own.
    """

    def __init__(self, products: Products | None = None) -> None:
        self._products = products
        self._kernel: MakeLinear | None = None

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None, *, float_out: bool = False) -> Linear:
        """For weights that are never quantized (the output layer), and for what a scheme cannot take.

        float_out: logits may come in float32, where that costs nothing: rounded to bfloat16 the best two are often one.
        """
        if self._kernel is None:
            self._kernel = dense_kernel(weight)
        linear = self._kernel(weight, bias)
        if self._products is not None and isinstance(linear, PackedLinear):
            return PanelLinear.of(linear, weight, self._products, float_out=float_out) or linear
        return linear

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        """The rows of these weights, one below the other, in `order`; `read` gives them dense."""
        return self.dense(read(), bias)


DenseScheme = WeightScheme


class Int8Scheme(WeightScheme):
    """Every matrix of the layers rounded to 8 bits."""

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        return Int8Linear(read(), bias)


class Int4Scheme(WeightScheme):
    """4-bit groups: `stored` finds them in a file (None: not stored so), the others are rounded if `rounds`.

    both: a dense copy is kept as well, for steps of more than FEW_ROWS rows. rounded, kept_dense: names, for the notes.
    """

    def __init__(
        self,
        stored: Callable[[str], Int4Weight | None],
        *,
        rounds: bool,
        both: bool,
        products: Products | None = None,
    ) -> None:
        super().__init__(products)
        self._stored = stored
        self._rounds = rounds
        self._both = both
        self.rounded: list[str] = []
        self.kept_dense: list[str] = []

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        weight = self._weight(names, order, read)
        if weight is None:
            return self.dense(read(), bias)
        few = Int4Linear(weight, bias)
        if not self._both:
            return few
        return RowsLinear(few, self.dense(read(), bias))

    def _weight(self, names: list[str], order: torch.Tensor | None, read: Read) -> Int4Weight | None:
        parts = [self._stored(name) for name in names]
        found = [part for part in parts if part is not None]
        if len(found) == len(names):
            weight = Int4Weight.join(found)
            if weight.codes.shape[0] % _ROWS == 0:
                return weight if order is None else weight.rows(order)
        elif self._rounds:
            dense = read()
            if dense.shape[0] % _ROWS == 0 and dense.shape[1] % GROUP == 0:
                self.rounded += names
                return quantize_int4(dense)
        self.kept_dense += names
        return None
