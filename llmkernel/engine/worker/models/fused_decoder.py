"""FusedDecoder: a whole decoder as few operations as torch allows, over one flat token axis, without transformers.

The residual stream stays in float32 (it costs nothing and halves the distance to float32 logits); weights, activations
and the cache are of the model's dtype. Operations were chosen by measurement, see ARCHITECTURE.md.
"""

import dataclasses
from typing import Protocol

import torch

from llmkernel.engine.worker.compiled.kernels import CompiledAttention
from llmkernel.engine.worker.linear.linear import Linear
from llmkernel.engine.worker.models.heads import Heads
from llmkernel.engine.worker.models.operations import Operations, RMSNorm
from llmkernel.engine.worker.models.rotary import Rotary

__all__ = ["AttendsJoined", "DecoderLayer", "FusedDecoder"]


class AttendsJoined(Protocol):
    """The attention of a step, for a decoder that has queries, keys and values side by side (PagedAttention).

    compiled: of its first rows, if a compiled kernel attends for them.
    """

    compiled: CompiledAttention | None

    def attend_joined(self, heads: Heads, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """joined [T, queries + row_size], as it comes from the product -> [T, H * Dv], good until the next call."""
        ...


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """One layer. qkv: hidden -> queries, keys, values. gate_up: hidden -> gate, up."""

    heads: Heads
    input_norm: RMSNorm
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.out, self.gate_up, self.down


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
        operations: Operations,
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
        self._operations = operations
        self._dtype = dtype
        self._embedding_multiplier = embedding_multiplier
        self._residual_multiplier = residual_multiplier
        self._sequence = operations.sequence(layers, residual_multiplier)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: AttendsJoined
    ) -> torch.Tensor:
        """token_ids, positions [T]; rows: indices into T -> logits [len(rows), vocab_size]."""
        hidden = self._embed(token_ids)
        rotation = self._rotary(positions)
        few, sequence = context.compiled, self._sequence
        if sequence is not None and few is not None and few.num_rows == len(hidden) <= sequence.most_rows:
            added = sequence.run(hidden, rotation, few)
            hidden, added = hidden.index_select(0, rows), added.index_select(0, rows)
        else:
            hidden, added = self._run_layers(hidden, rotation, rows, context)
        if not len(rows):
            return torch.empty(0, self.vocab_size, dtype=self._dtype, device=hidden.device)
        return self._head(self._operations.norm(self._final_norm, hidden, added, self._residual_multiplier))

    def _run_layers(
        self, hidden: torch.Tensor, rotation: torch.Tensor, rows: torch.Tensor, context: AttendsJoined
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `rows`, the residual stream and what the last half of a layer adds to it."""
        norm, gate, scale = self._operations.norm, self._operations.gate, self._residual_multiplier
        added: torch.Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            joined = layer.qkv(norm(layer.input_norm, hidden, added, scale))
            attended = context.attend_joined(layer.heads, joined, rotation)
            if index == last:  # nobody reads the other rows any more
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
                if not len(rows):
                    return hidden, attended
            added = layer.out(attended)
            added = layer.down(gate(layer.gate_up(norm(layer.mlp_norm, hidden, added, scale))))
        assert added is not None
        return hidden, added

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._embedding.index_select(0, token_ids)
        if rows.dtype != self._dtype:  # round as a model of this dtype would have
            rows = rows.to(self._dtype)
        hidden = rows.float()
        return hidden.mul_(self._embedding_multiplier) if self._embedding_multiplier != 1.0 else hidden
