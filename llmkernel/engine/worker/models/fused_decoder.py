"""FusedDecoder: a whole decoder as few operations as torch allows, over one flat token axis, without transformers.

The residual stream stays in float32 (it costs nothing and halves the distance to float32 logits); weights, activations
and the cache are of the model's dtype. Operations were chosen by measurement, see ARCHITECTURE.md.
"""

import dataclasses
import math
from typing import Protocol

import torch
from torch.nn import functional

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.linear.linear import Linear
from llmkernel.engine.worker.models.rotary import Rotary

__all__ = ["AttendsRows", "DecoderLayer", "FusedDecoder", "HeadNorms", "RMSNorm"]


class AttendsRows(Protocol):
    """The attention of a step, for a decoder that has its keys and values side by side (PagedAttention)."""

    def attend_rows(self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """query [T, H, D], of rows' dtype or float32; rows [T, row_size] (keys, then values) -> [T, H, Dv], as rows."""
        ...


class RMSNorm:
    """h float32 [T, n] -> h / sqrt(mean(h^2) + eps) * weight, in `dtype`. weight: float32 [n]."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(eps * size), device=weight.device)
        self._dtype = dtype

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        length = torch.hypot(torch.linalg.vector_norm(h, 2, -1, True), self._floor)  # exact with eps, 2 passes
        out = torch.empty(h.shape, dtype=self._dtype, device=h.device)
        return torch.mul(h / length, self._weight, out=out)


class HeadNorms:
    """RMSNorm of each query and key head, in place. weight: float32 [heads, D], a row per head."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def apply_(self, heads: torch.Tensor) -> None:
        wide = heads.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._eps))
        heads.copy_(wide.mul(scale).mul_(self._weight))


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """One layer. qkv: hidden -> queries, keys, values. gate_up: hidden -> gate, up. head_norms: Qwen3's."""

    attention: LayerSpec
    input_norm: RMSNorm
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    head_norms: HeadNorms | None = None


class FusedDecoder:
    """Runs its layers. embedding: [num_embeddings, hidden], of any float type, perhaps a view of a file.

    multipliers: Granite's scaling of embeddings and of what each half of a layer adds.
    """

    implementation = "fused"

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
        rotary: Rotary,
        *,
        dtype: torch.dtype,
        vocab_size: int,
        embedding_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
    ) -> None:
        self.num_embeddings = embedding.shape[0]
        self.vocab_size = vocab_size
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary
        self._dtype = dtype
        self._embedding_multiplier = embedding_multiplier
        self._residual_multiplier = residual_multiplier

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: AttendsRows
    ) -> torch.Tensor:
        """token_ids, positions [T]; rows: indices into T -> logits [len(rows), vocab_size]."""
        hidden = self._embed(token_ids)
        rotation = self._rotary(positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(layer, hidden, rotation, context)
            if index == last:  # nobody reads the other rows any more
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
            hidden.add_(layer.out(attended), alpha=self._residual_multiplier)
            hidden.add_(self._mlp(layer, hidden), alpha=self._residual_multiplier)
        if not len(rows):
            return torch.empty(0, self.vocab_size, dtype=self._dtype, device=hidden.device)
        return self._head(self._final_norm(hidden))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._embedding.index_select(0, token_ids)
        if rows.dtype != self._dtype:  # round as a model of this dtype would have
            rows = rows.to(self._dtype)
        hidden = rows.float()
        return hidden.mul_(self._embedding_multiplier) if self._embedding_multiplier != 1.0 else hidden

    def _attend(
        self, layer: DecoderLayer, hidden: torch.Tensor, rotation: torch.Tensor, context: AttendsRows
    ) -> torch.Tensor:
        spec = layer.attention
        joined = layer.qkv(layer.input_norm(hidden))
        tokens, queries = joined.shape[0], spec.num_heads * spec.key_size
        turned = queries + spec.num_kv_heads * spec.key_size
        heads = joined[:, :turned].view(tokens, -1, spec.key_size)
        if layer.head_norms is not None:
            layer.head_norms.apply_(heads)
        wide = self._rotary.turn(heads, rotation)
        if wide is not heads:
            joined[:, queries:turned].view(tokens, -1, spec.key_size).copy_(wide[:, spec.num_heads :])
        return context.attend_rows(spec, wide[:, : spec.num_heads], joined[:, queries:]).reshape(tokens, -1)

    def _mlp(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down(functional.silu(gate).mul_(up))
