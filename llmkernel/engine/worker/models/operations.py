"""Operations: what a decoder does between its products, by torch or compiled."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from llmkernel.engine.worker.compiled.layer_sequence import LayerSequence
    from llmkernel.engine.worker.models.fused_decoder import DecoderLayer

__all__ = ["Operations", "RMSNorm", "TorchOperations"]


class RMSNorm:
    """h float32 [T, n] -> h / sqrt(mean(h^2) + eps) * weight, in `dtype`. weight: float32 [n], at `address`."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._weight = weight.float().contiguous()
        self.address = self._weight.data_ptr()
        self.eps = eps
        self._scaled = self._weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(eps * size), device=weight.device)
        self._dtype = dtype

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        length = torch.hypot(torch.linalg.vector_norm(h, 2, -1, True), self._floor)  # exact with eps, 2 passes
        out = torch.empty(h.shape, dtype=self._dtype, device=h.device)
        return torch.mul(h / length, self._scaled, out=out)


class Operations(Protocol):
    """What comes back is good until the same operation is called again."""

    def norm(self, norm: RMSNorm, hidden: torch.Tensor, added: torch.Tensor | None, scale: float) -> torch.Tensor:
        """hidden float32 [T, n] += scale * added, in place (None: nothing); then its norm, of the model's dtype."""
        ...

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        """joined [T, 2 n]: gate, up -> silu(gate) * up [T, n]."""
        ...

    def sequence(self, layers: "Sequence[DecoderLayer]", scale: float) -> "LayerSequence | None":
        """All layers in one call, for steps of few rows; None: there is none. scale: of what a half of a layer adds."""
        ...


class TorchOperations:
    """Operations on every device and in every float type."""

    def norm(self, norm: RMSNorm, hidden: torch.Tensor, added: torch.Tensor | None, scale: float) -> torch.Tensor:
        if added is not None:
            hidden.add_(added, alpha=scale)
        return norm(hidden)

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def sequence(self, layers: "Sequence[DecoderLayer]", scale: float) -> None:
        return None
