"""Heads: what happens to the queries, keys and values of a layer between their product and its attention."""

import torch

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.models.rotary import Rotary

__all__ = ["HeadNorms", "Heads"]


class HeadNorms:
    """RMSNorm of each query and key head, in place. weight: float32 [heads, D], a row per head."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.contiguous()
        self.eps = eps

    def apply_(self, heads: torch.Tensor) -> None:
        wide = heads.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        heads.copy_(wide.mul(scale).mul_(self.weight))


class Heads:
    """The heads of one layer. A token's numbers are its queries, its keys, then its values.

    norms: Qwen3's; their weights lie at norms_address, 0: none.
    """

    def __init__(self, layer: LayerSpec, rotary: Rotary, norms: HeadNorms | None = None) -> None:
        self.layer = layer
        self.norms_address = 0 if norms is None else norms.weight.data_ptr()
        self.norms_eps = 0.0 if norms is None else norms.eps
        self._norms = norms
        self._rotary = rotary
        self._queries = layer.num_heads * layer.key_size
        self._turned = self._queries + layer.num_kv_heads * layer.key_size

    def split(self, joined: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """joined [T, queries + row_size], rotation as of Rotary -> queries [T, H, D], turned, of joined's dtype or
        float32; rows [T, row_size] for the cache, a view of joined."""
        layer, tokens = self.layer, joined.shape[0]
        heads = joined[:, : self._turned].view(tokens, -1, layer.key_size)
        if self._norms is not None:
            self._norms.apply_(heads)
        wide = self._rotary.turn(heads, rotation)
        if wide is not heads:
            joined[:, self._queries : self._turned].view(tokens, -1, layer.key_size).copy_(wide[:, layer.num_heads :])
        return wide[:, : layer.num_heads], joined[:, self._queries :]
