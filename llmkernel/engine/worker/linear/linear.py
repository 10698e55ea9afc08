"""Linear: what the decoder calls. PlainLinear: torch's own product, right on every device and in every float type."""

import abc

import torch
from torch.nn import functional

from llmkernel.engine.worker.compiled.products import PanelWeight

__all__ = ["Linear", "PlainLinear"]


class Linear(abc.ABC):
    """x [T, in] -> [T, out] in the dtype of x. kind: its name for people. nbytes: memory of weight and bias.

    panels: what a compiled kernel multiplies up to most_panel_rows rows with; None: it has no such form.
    """

    kind: str
    nbytes: int
    panels: PanelWeight | None = None
    most_panel_rows = 0

    @abc.abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear(Linear):
    """weight [out, in] as it is; it is shared with whoever else holds it (tied embeddings)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.kind = str(weight.dtype).removeprefix("torch.")
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self._bias)
