"""RowsLinear: two forms of one weight, chosen by the number of rows of a step. It takes the memory of both."""

import torch

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["RowsLinear"]


class RowsLinear(Linear):
    """`few` for up to `few_rows` rows, `many` above.

    The number is fixed, not measured at each load: the form decides the last bits of a logit, and a seed is to give the
    same text after every load on a machine.
    """

    def __init__(self, few: Linear, many: Linear, few_rows: int) -> None:
        self.kind = f"{few.kind} and {many.kind}"
        self.nbytes = few.nbytes + many.nbytes
        self.few = few
        self.many = many
        self._few_rows = few_rows
        self.panels = few.panels
        self.most_panel_rows = min(few_rows, few.most_panel_rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] <= self._few_rows else self.many(x)
