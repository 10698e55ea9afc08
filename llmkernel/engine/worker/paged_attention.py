"""Attention of one step over the KV store: writes this step's keys and values, then attends request by request.

Decodes (one token) and short chunks (a token with its drafts) are padded together in a few groups of similar length;
groups that last keep their keys and values side by side (DenseRows). Longer chunks attend one at a time.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from llmkernel.engine.worker.attention import LayerSpec, batched_products_win
from llmkernel.engine.worker.attention_spans import AttentionSpan, DenseSpan, GatheredSpan, ShortChunksSpan
from llmkernel.engine.worker.compiled.kernels import CompiledKernels
from llmkernel.engine.worker.dense_rows import DenseGroup, DenseRows
from llmkernel.engine.worker.kv_store import KVStore, Slots
from llmkernel.engine.worker.models.heads import Heads
from llmkernel.engine.worker.scheduled_tokens import Padding, ScheduledTokens, apart, block_table

__all__ = ["PagedAttention", "ScheduledTokens"]

PADDING_BUDGET = 512
"""Padded tokens that a group of decodes may hold before another call is cheaper (30 us of calls = 500 tokens read)."""


class PagedAttention:
    """The AttentionContext of a step. `sequences`: those of the token axis, in attention_order.

    Blocks are picked and masks are made once per step and window; all layers of that window share them. dense: where
    groups keep what they have gathered, if they do. kernels: compiled ones.
    compiled: what they attend for, all that is few; None: nothing.
    """

    def __init__(
        self,
        store: KVStore,
        layers: Mapping[Hashable, LayerSpec],
        sequences: Sequence[ScheduledTokens],
        *,
        dtype: torch.dtype,
        device: torch.device,
        dense: DenseRows | None = None,
        kernels: CompiledKernels | None = None,
    ) -> None:
        self._store = store
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._dense = dense
        self.num_calls = 0
        if dense is not None:
            dense.begin_step()
        few = list(itertools.takewhile(lambda one: one.is_few, sequences))
        self.compiled = kernels.plan(store, few) if kernels is not None and few else None
        if self.compiled is not None:
            sequences = sequences[len(few) :]
        if sequences:
            self._slots = self._find_slots(sequences)
            windows = {layer.window for layer in layers.values()}
            self._spans = {window: self._plan(sequences, window) for window in windows}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        rows = torch.cat((key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)), -1)
        return self._write_and_attend(self._layers[module], query[0].transpose(0, 1), rows, asked.get("s_aux"))

    def attend_joined(self, heads: Heads, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """For the fused decoder, see its AttendsJoined."""
        few = self.compiled
        if few is None:
            return self._write_and_attend(heads.layer, *heads.split(joined, rotation), None).flatten(1)
        if few.num_rows == joined.shape[0]:
            self.num_calls += 1
            return few.attend(heads, joined, rotation)
        out = joined.new_empty(joined.shape[0], heads.layer.num_heads * heads.layer.value_size)
        out[: few.num_rows] = few.attend(heads, joined, rotation)
        others = heads.split(joined[few.num_rows :], rotation[few.num_rows :])
        out[few.num_rows :] = self._write_and_attend(heads.layer, *others, None).flatten(1)
        return out

    def _write_and_attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.num_calls += 1
        self._store.write(layer.index, self._slots, rows)
        spans = self._spans[layer.window]
        if len(spans) == 1:
            return spans[0].attend(layer, query, rows, sinks)
        return torch.cat([span.attend(layer, query, rows, sinks) for span in spans])

    def _find_slots(self, sequences: Sequence[ScheduledTokens]) -> Slots:
        size = self._store.block_size
        blocks, offsets = [], []
        for sequence in sequences:
            positions = np.arange(sequence.num_computed, sequence.context)
            blocks.append(sequence.block_ids[positions // size])
            offsets.append(positions % size)
        return self._store.slots(self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(offsets)))

    def _plan(self, sequences: Sequence[ScheduledTokens], window: int | None) -> list[AttentionSpan]:
        spans: list[AttentionSpan] = []
        start = 0
        few = list(itertools.takewhile(lambda one: one.is_few, sequences))
        for part in apart(few):
            for group in _groups(part, window):
                spans.append(self._few_span(group, start, window))
                start += sum(sequence.num_tokens for sequence in group)
        for sequence in sequences[len(few) :]:
            kept = self._open_dense([sequence], window) if sequence.is_piece else None
            spans.append(
                self._chunk_span(sequence, start, window)
                if kept is None
                else DenseSpan(start, sequence.num_tokens, kept)
            )
            start += sequence.num_tokens
        return spans

    def _few_span(self, group: Sequence[ScheduledTokens], start: int, window: int | None) -> AttentionSpan:
        kept = self._open_dense(group, window)
        if kept is not None:
            return DenseSpan(start, sum(sequence.num_tokens for sequence in group), kept)
        if all(sequence.num_tokens == 1 for sequence in group):
            return self._decode_span(group, start, window)
        return self._short_span(group, start, window)

    def _open_dense(self, group: Sequence[ScheduledTokens], window: int | None) -> DenseGroup | None:
        """Kept rows of layers without a window, whose keys and values are of one size."""
        if self._dense is None or window is not None:
            return None
        layers = [layer for layer in self._layers.values() if layer.window is None]
        if any(layer.key_size != layer.value_size for layer in layers):
            return None
        return self._dense.open(group, layers)

    def _decode_span(self, group: Sequence[ScheduledTokens], start: int, window: int | None) -> GatheredSpan:
        size = self._store.block_size
        firsts = np.array([sequence.first_seen(window) // size for sequence in group])
        ends = np.array([sequence.context for sequence in group]) - firsts * size
        length = int(ends.max())
        table = block_table(group, firsts, -(-length // size), size)
        if batched_products_win(self._dtype, self._device, len(group), table.shape[1] * size):
            length = table.shape[1] * size
        begins = np.array([sequence.first_seen(window) for sequence in group]) - firsts * size
        mask = None
        if begins.any() or (ends != length).any():
            positions = np.arange(length)
            hidden = (positions < begins[:, None]) | (positions >= ends[:, None])
            mask = self._mask(hidden)[:, None, None, :]
        return self._gathered(start, len(group), table, length, mask, causal=False)

    def _short_span(self, group: Sequence[ScheduledTokens], start: int, window: int | None) -> ShortChunksSpan:
        size = self._store.block_size
        firsts = np.array([sequence.first_seen(window) // size for sequence in group])
        blocks = max(-(-sequence.context // size) - first for sequence, first in zip(group, firsts, strict=True))
        table = block_table(group, firsts, blocks, size)
        padding = Padding.of(group)
        keys = firsts[:, None] * size + np.arange(blocks * size)
        hidden = keys[:, None, :] > padding.positions[:, :, None]
        if window is not None:
            hidden |= keys[:, None, :] <= padding.positions[:, :, None] - window
        return ShortChunksSpan(
            self._store,
            self._store.places(self._tensor(table)),
            padded=self._tensor(start + padding.rows),
            kept=None if padding.kept is None else self._tensor(padding.kept),
            mask=self._mask(hidden)[:, None],
        )

    def _chunk_span(self, sequence: ScheduledTokens, start: int, window: int | None) -> GatheredSpan:
        size = self._store.block_size
        first = sequence.first_seen(window) // size
        base, context = first * size, sequence.context
        table = sequence.block_ids[None, first : -(-context // size)]
        if window is not None and context <= window:
            window = None
        if sequence.num_computed == 0 and window is None:
            return self._gathered(start, sequence.num_tokens, table, context, None, causal=True)
        queries = np.arange(sequence.num_computed, context)[:, None]
        keys = np.arange(base, context)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return self._gathered(start, sequence.num_tokens, table, context - base, self._mask(hidden), causal=False)

    def _gathered(
        self, start: int, rows: int, table: np.ndarray, length: int, mask: torch.Tensor | None, *, causal: bool
    ) -> GatheredSpan:
        """table: int64 [requests, blocks]."""
        places = self._store.places(self._tensor(table))
        return GatheredSpan(self._store, start, rows, len(table), places, length, mask, causal)

    def _mask(self, hidden: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._tensor(hidden), -torch.inf)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _groups(decodes: Sequence[ScheduledTokens], window: int | None) -> list[Sequence[ScheduledTokens]]:
    """Cut decodes, ordered by length, into groups that waste few padded tokens each."""
    groups: list[Sequence[ScheduledTokens]] = []
    lengths = [sequence.context - sequence.first_seen(window) for sequence in decodes]
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
