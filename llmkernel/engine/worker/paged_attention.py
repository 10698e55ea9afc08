"""Attention of one step over the KV store: writes this step's keys and values, then attends request by request.

Decodes (one token) are padded together in a few groups of similar length, and so are short chunks (a token with its
drafts); longer chunks attend one request at a time.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from llmkernel.engine.worker.attention import LayerSpec, attend, batched_products_win
from llmkernel.engine.worker.kv_store import KVStore

__all__ = ["PagedAttention", "ScheduledTokens"]

PADDING_BUDGET = 512
"""Padded tokens that a group of decodes may hold before another call is cheaper (30 us of calls = 500 tokens read)."""

SHORT_CHUNK = 16
"""Tokens up to which chunks attend in groups: drafts, and what a cached prefix leaves of a prompt."""


@dataclasses.dataclass(frozen=True)
class ScheduledTokens:
    """Tokens of one request in this step: `num_tokens` of them, after `num_computed` that the cache holds."""

    num_tokens: int
    num_computed: int
    block_ids: np.ndarray

    @property
    def is_short_chunk(self) -> bool:
        return 1 < self.num_tokens <= SHORT_CHUNK and self.num_computed > 0

    @property
    def context(self) -> int:
        """Tokens in the cache once this step's are written."""
        return self.num_computed + self.num_tokens


@dataclasses.dataclass(frozen=True)
class _Span:
    """Rows [start, start + rows) of the token axis that attend in one call.

    Decode group: `rows` requests of one token. Chunk: one request, `rows` tokens, requests = 1. Short chunks: `rows`
    tokens of some requests, made equally many by repeating the last of each: `padded` picks them, `kept` takes the
    true ones of what comes out (None: all).
    block_ids: flat table [requests * blocks]. length: keys to use of each table. mask: see attention.attend.
    """

    start: int
    rows: int
    requests: int
    block_ids: torch.Tensor
    length: int
    mask: torch.Tensor | None
    causal: bool
    padded: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class PagedAttention:
    """The AttentionContext of a step. `sequences` in the order of the token axis, decodes first, by context length.

    Blocks are picked and masks are made once per step and window; all layers of that window share them.
    """

    def __init__(
        self,
        store: KVStore,
        layers: Mapping[Hashable, LayerSpec],
        sequences: Sequence[ScheduledTokens],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._store = store
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.num_calls = 0
        self._block_ids, self._offsets = self._slots(sequences)
        self._spans = {window: self._plan(sequences, window) for window in {layer.window for layer in layers.values()}}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        rows = torch.cat((key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)), -1)
        return self._write_and_attend(self._layers[module], query, rows, asked.get("s_aux"))

    def attend_rows(self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """For the fused decoder: query [T, H, D], rows [T, row_size] (keys, then values) -> [T, H, Dv]."""
        return self._write_and_attend(layer, query.transpose(0, 1)[None], rows, None)

    def _write_and_attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.num_calls += 1
        self._store.write(layer.index, self._block_ids, self._offsets, rows)
        spans = self._spans[layer.window]
        parts = [self._attend_span(span, query, layer, sinks) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(
        self, span: _Span, query: torch.Tensor, layer: LayerSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[rows, H, Dv] of one span."""
        keys, values = self._store.gather(layer.index, span.block_ids, span.requests)
        keys, values = keys[:, :, : span.length], values[:, :, : span.length]
        if span.padded is not None:
            part = query[0].index_select(1, span.padded).unflatten(1, (span.requests, -1)).transpose(0, 1)
            out = attend(part, keys, values, layer, span.mask, sinks=sinks).transpose(1, 2).flatten(0, 1)
            return out if span.kept is None else out.index_select(0, span.kept)
        part = query[:, :, span.start : span.start + span.rows]
        if span.requests > 1:  # one token of each: requests are the batch
            out = attend(part.transpose(0, 2), keys, values, layer, span.mask, sinks=sinks)
            return out[:, :, 0]
        out = attend(part, keys, values, layer, span.mask, causal=span.causal, sinks=sinks)
        return out[0].transpose(0, 1)

    def _slots(self, sequences: Sequence[ScheduledTokens]) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._store.block_size
        blocks, offsets = [], []
        for sequence in sequences:
            positions = np.arange(sequence.num_computed, sequence.context)
            blocks.append(sequence.block_ids[positions // size])
            offsets.append(positions % size)
        return self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(offsets))

    def _plan(self, sequences: Sequence[ScheduledTokens], window: int | None) -> list[_Span]:
        spans: list[_Span] = []
        start = 0
        num_decodes = sum(1 for sequence in sequences if sequence.num_tokens == 1)
        for group in _groups(sequences[:num_decodes], window):
            spans.append(self._decode_span(group, start, window))
            start += len(group)
        for is_short, neighbours in itertools.groupby(sequences[num_decodes:], lambda one: one.is_short_chunk):
            chunks = list(neighbours)
            for group in _groups(chunks, window) if is_short else [[chunk] for chunk in chunks]:
                spans.append(
                    self._short_span(group, start, window) if is_short else self._chunk_span(group[0], start, window)
                )
                start += sum(chunk.num_tokens for chunk in group)
        return spans

    def _decode_span(self, group: Sequence[ScheduledTokens], start: int, window: int | None) -> _Span:
        size = self._store.block_size
        firsts = np.array([_first_seen(sequence, window) // size for sequence in group])
        ends = np.array([sequence.context for sequence in group]) - firsts * size
        length = int(ends.max())
        table = np.zeros((len(group), -(-length // size)), dtype=np.int64)
        if batched_products_win(self._dtype, self._device, len(group), table.shape[1] * size):
            length = table.shape[1] * size
        for row, (sequence, first) in enumerate(zip(group, firsts, strict=True)):
            used = sequence.block_ids[first : -(-sequence.context // size)]
            table[row, : len(used)] = used
        begins = np.array([_first_seen(sequence, window) for sequence in group]) - firsts * size
        mask = None
        if begins.any() or (ends != length).any():
            positions = np.arange(length)
            hidden = (positions < begins[:, None]) | (positions >= ends[:, None])
            mask = self._mask(hidden)[:, None, None, :]
        return _Span(start, len(group), len(group), self._tensor(table.ravel()), length, mask, causal=False)

    def _short_span(self, group: Sequence[ScheduledTokens], start: int, window: int | None) -> _Span:
        size = self._store.block_size
        firsts = np.array([_first_seen(sequence, window) // size for sequence in group])
        blocks = max(-(-sequence.context // size) - first for sequence, first in zip(group, firsts, strict=True))
        table = np.zeros((len(group), blocks), dtype=np.int64)
        for row, (sequence, first) in enumerate(zip(group, firsts, strict=True)):
            used = sequence.block_ids[first : -(-sequence.context // size)]
            table[row, : len(used)] = used
        counts = np.array([sequence.num_tokens for sequence in group])[:, None]
        tokens = np.arange(counts.max())
        places = np.minimum(tokens, counts - 1)
        queries = np.array([sequence.num_computed for sequence in group])[:, None] + places
        keys = firsts[:, None] * size + np.arange(blocks * size)
        hidden = keys[:, None, :] > queries[:, :, None]
        if window is not None:
            hidden |= keys[:, None, :] <= queries[:, :, None] - window
        begins = start + np.cumsum(counts, axis=0) - counts
        true = tokens < counts
        return _Span(
            start,
            int(counts.sum()),
            len(group),
            self._tensor(table.ravel()),
            blocks * size,
            self._mask(hidden)[:, None],
            causal=False,
            padded=self._tensor((begins + places).ravel()),
            kept=None if true.all() else self._tensor(np.flatnonzero(true)),
        )

    def _chunk_span(self, sequence: ScheduledTokens, start: int, window: int | None) -> _Span:
        size = self._store.block_size
        first = _first_seen(sequence, window) // size
        base, context = first * size, sequence.context
        table = self._tensor(sequence.block_ids[first : -(-context // size)])
        if window is not None and context <= window:
            window = None
        if sequence.num_computed == 0 and window is None:
            return _Span(start, sequence.num_tokens, 1, table, context, None, causal=True)
        queries = np.arange(sequence.num_computed, context)[:, None]
        keys = np.arange(base, context)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return _Span(start, sequence.num_tokens, 1, table, context - base, self._mask(hidden), causal=False)

    def _mask(self, hidden: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._tensor(hidden), -torch.inf)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _first_seen(sequence: ScheduledTokens, window: int | None) -> int:
    """The first position that the first of these tokens sees."""
    return 0 if window is None else max(0, sequence.num_computed + 1 - window)


def _groups(decodes: Sequence[ScheduledTokens], window: int | None) -> list[Sequence[ScheduledTokens]]:
    """Cut decodes, ordered by length, into groups that waste few padded tokens each."""
    groups: list[Sequence[ScheduledTokens]] = []
    lengths = [sequence.context - _first_seen(sequence, window) for sequence in decodes]
    end = len(decodes)
    wasted = 0
    for index in range(len(decodes) - 1, -1, -1):
        wasted += lengths[end - 1] - lengths[index]
        if wasted > PADDING_BUDGET:
            groups.append(decodes[index + 1 : end])
            end, wasted = index + 1, 0
    if end:
        groups.append(decodes[:end])
    return groups[::-1]
