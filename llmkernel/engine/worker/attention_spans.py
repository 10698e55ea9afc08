"""The calls of which the attention of a step is made: each answers for some consecutive rows of its token axis."""

import dataclasses
from typing import Protocol

import torch

from llmkernel.engine.worker.attention import LayerSpec, attend
from llmkernel.engine.worker.dense_rows import DenseGroup
from llmkernel.engine.worker.kv_store import KVStore, Places

__all__ = ["AttentionSpan", "DenseSpan", "GatheredSpan", "ShortChunksSpan"]


class AttentionSpan(Protocol):
    """Attends for its rows."""

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Of the whole step: query [T, H, D], of rows' dtype or float32; rows [T, row_size] (keys, then values).

        Returns [its rows, H, Dv], as rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DenseSpan:
    """A group of decodes, rows [start, start + rows) of the token axis, whose keys and values are kept."""

    start: int
    rows: int
    group: DenseGroup

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if self.rows != query.shape[0]:
            here = slice(self.start, self.start + self.rows)
            query, rows = query[here], rows[here]
        return self.group.attend(layer, query, rows, sinks)


@dataclasses.dataclass(frozen=True)
class GatheredSpan:
    """Rows [start, start + rows) of the token axis that attend in one call to what the pool holds.

    Decode group: `rows` requests of one token. Chunk: one request, `rows` tokens, requests = 1.
    length: keys to use of each request. mask: see attention.attend.
    """

    store: KVStore
    start: int
    rows: int
    requests: int
    places: Places
    length: int
    mask: torch.Tensor | None
    causal: bool

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.store.gather(layer.index, self.places)
        keys, values = keys[:, :, : self.length], values[:, :, : self.length]
        part = query[self.start : self.start + self.rows].to(rows.dtype)
        if self.requests > 1:  # one token of each: requests are the batch
            return attend(part[:, :, None], keys, values, layer, self.mask, sinks=sinks)[:, :, 0]
        part = part.transpose(0, 1)[None]
        return attend(part, keys, values, layer, self.mask, causal=self.causal, sinks=sinks)[0].transpose(0, 1)


@dataclasses.dataclass(frozen=True)
class ShortChunksSpan:
    """A few tokens of each of some requests, made equally many by repeating the last of each.

    padded: which rows of the token axis, [requests * tokens]. kept: which of what comes out are true ones; None: all.
    mask: [requests, 1, tokens, keys].
    """

    store: KVStore
    places: Places
    padded: torch.Tensor
    kept: torch.Tensor | None
    mask: torch.Tensor

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.store.gather(layer.index, self.places)
        part = query.index_select(0, self.padded).to(rows.dtype).unflatten(0, (len(keys), -1)).transpose(1, 2)
        out = attend(part, keys, values, layer, self.mask, sinks=sinks).transpose(1, 2).flatten(0, 1)
        return out if self.kept is None else out.index_select(0, self.kept)
