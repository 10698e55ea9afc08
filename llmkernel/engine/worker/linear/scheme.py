"""WeightScheme: how a model's matrices are kept: dense, rounded to 8 bits, or in groups of 4 or 8 bits."""

import dataclasses
from collections.abc import Callable

import torch

from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.linear.group_linear import GroupLinear
from llmkernel.engine.worker.linear.group_weight import GROUP, GroupWeight, quantize_int4, quantize_int8
from llmkernel.engine.worker.linear.int4_linear import Int4Linear, int4_works
from llmkernel.engine.worker.linear.int8_linear import Int8Linear
from llmkernel.engine.worker.linear.kernel_choice import MakeLinear, dense_kernel
from llmkernel.engine.worker.linear.linear import Linear
from llmkernel.engine.worker.linear.packed_linear import PackedLinear, packing_works
from llmkernel.engine.worker.linear.panel_linear import PanelLinear
from llmkernel.engine.worker.linear.rows_linear import RowsLinear

__all__ = ["FEW_ROWS", "NO_COPIES", "Copies", "DenseScheme", "GroupScheme", "Int8Scheme", "WeightScheme"]

FEW_ROWS = 8
"""Rows up to which 4 bits are faster than a dense copy, where that is kept beside them."""

_FEW_LOGITS = 4
"""Rows of logits up to which 8 bits are."""

_ROWS = 16
"""torch's 4-bit kernel wants a multiple of so many rows."""

Read = Callable[[], torch.Tensor]


class WeightScheme:
    """The dense scheme: each weight in the form that is fastest here: with compiled products oneDNN's, which they read;
    without, measured once.
    """

    def __init__(self, products: Products | None = None) -> None:
        self._products = products
        self._kernel: MakeLinear | None = None

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        """The rows of these weights, one below the other, in `order`; `read` gives them dense."""
        return self._dense(read(), bias)

    def head(self, name: str, read: Read) -> Linear:
        """The output layer. Where that costs nothing its products come in float32: rounded to bfloat16 the best two
        are often one."""
        return self._dense(read(), None, float_out=True)

    def _dense(self, weight: torch.Tensor, bias: torch.Tensor | None, *, float_out: bool = False) -> Linear:
        if self._kernel is None:
            compiled = self._products is not None and packing_works()
            self._kernel = PackedLinear if compiled else dense_kernel(weight)
        linear = self._kernel(weight, bias)
        if self._products is not None and isinstance(linear, PackedLinear):
            return PanelLinear.of(linear, weight, self._products, float_out=float_out) or linear
        return linear


DenseScheme = WeightScheme


class Int8Scheme(WeightScheme):
    """Every matrix of the layers rounded to 8 bits."""

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        weight = read()
        if self._products is None or weight.shape[1] % GROUP:
            return Int8Linear(weight, bias)
        return GroupLinear(quantize_int8(weight), bias, self._products)


@dataclasses.dataclass(frozen=True)
class Copies:
    """What is kept dense as well: layers, for steps of more than FEW_ROWS rows; an output layer that is stored in 8
    bits, for more than a few logits."""

    layers: bool = False
    head: bool = False


NO_COPIES = Copies()


class GroupScheme(WeightScheme):
    """Groups of 4 or 8 bits: `stored` finds them in a file (None: not stored so), the others are rounded if `rounds`.

    rounded, kept_dense: names, for the notes.
    """

    def __init__(
        self,
        stored: Callable[[str], GroupWeight | None],
        *,
        rounds: bool,
        copies: Copies,
        products: Products | None = None,
    ) -> None:
        super().__init__(products)
        self._stored = stored
        self._rounds = rounds
        self._copies = copies
        self.rounded: list[str] = []
        self.kept_dense: list[str] = []

    def linear(self, names: list[str], order: torch.Tensor | None, read: Read, bias: torch.Tensor | None) -> Linear:
        weight = self._weight(names, order, read)
        if weight is None:
            return self._dense(read(), bias)
        few: Linear = Int4Linear(weight, bias) if self._products is None else GroupLinear(weight, bias, self._products)
        return RowsLinear(few, self._dense(read(), bias), FEW_ROWS) if self._copies.layers else few

    def head(self, name: str, read: Read) -> Linear:
        few = self._stored_head(name)
        if few is None:
            return super().head(name, read)
        copied = self._copies.head and few.kind == "8-bit"
        return RowsLinear(few, super().head(name, read), _FEW_LOGITS) if copied else few

    def _stored_head(self, name: str) -> GroupLinear | None:
        weight = None if self._products is None else self._stored(name)
        if weight is None:
            return None
        assert self._products is not None
        return GroupLinear(weight, None, self._products, float_out=True)

    def _weight(self, names: list[str], order: torch.Tensor | None, read: Read) -> GroupWeight | None:
        found = [part for name in names if (part := self._stored(name)) is not None and self._takes(part)]
        if len(found) == len(names) and len({part.bits for part in found}) == 1:
            weight = GroupWeight.join(found)
            if self._products is not None or weight.codes.shape[0] % _ROWS == 0:
                return weight if order is None else weight.rows(order)
        elif self._rounds:
            dense = read()
            if dense.shape[1] % GROUP == 0 and (self._products is not None or dense.shape[0] % _ROWS == 0):
                self.rounded += names
                return quantize_int4(dense)
        self.kept_dense += names
        return None

    def _takes(self, weight: GroupWeight) -> bool:
        """Without compiled products there is torch's kernel, for 4 bits; what is rounded to them has no 8."""
        if self._products is None:
            return weight.bits == 4 and int4_works()
        return weight.bits == 4 or not self._rounds
