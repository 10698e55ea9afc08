"""DenseRows: the keys and values of running decodes side by side, kept from one step to the next.

The pool is the truth; what is gathered from it for a group of decodes is the same in the next step but for one token
each, or a few with drafts. So the gather of a group that lasts is kept, and each step adds its tokens to it, beside the
pool, until the group changes or outgrows it; drafts that were rejected are written over. It can be dropped at any time.
Figures: ARCHITECTURE.md.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from llmkernel.engine.worker.attention import LayerSpec, attend, attend_products
from llmkernel.engine.worker.kv_store import KVStore, Places
from llmkernel.engine.worker.scheduled_tokens import SHORT_CHUNK, Padding, ScheduledTokens, block_table

__all__ = ["DenseGroup", "DenseRows"]

_SINGLE_PRECISION = 1024
"""Keys of a group up to which float32 products are the faster ones: those in bfloat16 take 10 us to start."""

_STEPS = 8
"""Steps of as many tokens as in the first one that a group has room for at least."""

Owners = tuple[Hashable, ...]


class DenseRows:
    """Owner of the kept gathers. max_bytes: what they may take together; a group that would exceed it is not kept."""

    def __init__(self, store: KVStore, dtype: torch.dtype, device: torch.device, max_bytes: int) -> None:
        self._store = store
        self._dtype = dtype
        self._device = device
        self._max_bytes = max_bytes if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) else 0
        self._seen: dict[Owners, list[int]] = {}
        self._kept: dict[Owners, DenseGroup] = {}
        self._next: dict[Owners, DenseGroup | None] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(group.num_bytes for group in self._kept.values())

    def begin_step(self) -> None:
        """A forward will run: what one that raised had opened is forgotten."""
        self._next = {}

    def open(self, sequences: Sequence[ScheduledTokens], layers: Sequence[LayerSpec]) -> "DenseGroup | None":
        """The kept rows of these decodes (which see the first token of their text), ready for their tokens.

        None where they are not worth it: a group is kept from the second step on that it runs in.
        """
        owners = tuple(sequence.owner for sequence in sequences)
        if None in owners or not self._max_bytes:
            return None
        self._next[owners] = None
        seen = self._seen.get(owners)
        if seen is None or any(one.num_computed > context for one, context in zip(sequences, seen, strict=True)):
            return None
        group = self._kept.get(owners)
        if group is None or not group.begin_step(sequences):
            group = self._make(sequences, layers)
        self._next[owners] = group
        return group

    def end_step(self, sequences: Sequence[ScheduledTokens]) -> None:
        """The forward has run: what it did not use is dropped."""
        contexts = {sequence.owner: sequence.context for sequence in sequences}
        self._seen = {owners: [contexts[owner] for owner in owners] for owners in self._next}
        self._kept = {owners: group for owners, group in self._next.items() if group is not None}
        self._next = {}

    def _make(self, sequences: Sequence[ScheduledTokens], layers: Sequence[LayerSpec]) -> "DenseGroup | None":
        size = self._store.block_size
        tokens = max(sequence.num_tokens for sequence in sequences)
        room = max(size, _STEPS * tokens)
        blocks = max(-(-(sequence.context + room) // size) for sequence in sequences)
        keys = len(sequences) * blocks * size
        dtype = torch.float32 if keys <= _SINGLE_PRECISION and tokens <= SHORT_CHUNK else self._dtype
        num_bytes = sum(layer.row_size for layer in layers) * keys * dtype.itemsize
        others = {owners: group for owners, group in self._kept.items() if owners not in self._next} | self._next
        if num_bytes + sum(group.num_bytes for group in others.values() if group is not None) > self._max_bytes:
            return None
        table = block_table(sequences, [0] * len(sequences), blocks, size)
        places = self._store.places(torch.from_numpy(table))
        return DenseGroup(self._store, places, sequences, blocks * size, dtype, num_bytes)


class DenseGroup:
    """Some decodes. In its first step each layer is copied from the pool, which has the step's tokens by then; in later
    ones it takes the tokens of the step.

    capacity: tokens per request. The mask [R, tokens, capacity] hides from each token what lies behind it.
    """

    def __init__(
        self,
        store: KVStore,
        places: Places,
        sequences: Sequence[ScheduledTokens],
        capacity: int,
        dtype: torch.dtype,
        num_bytes: int,
    ) -> None:
        self.num_bytes = num_bytes
        self._store = store
        self._places = places
        self._capacity = capacity
        self._dtype = dtype
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._ends: list[int]
        self._mask: torch.Tensor
        self._requests: torch.Tensor
        self._positions: torch.Tensor
        self._padded: torch.Tensor | None
        self._kept: torch.Tensor | None
        self._aim(sequences)

    def begin_step(self, sequences: Sequence[ScheduledTokens]) -> bool:
        """Make room for the tokens of each; False if there is none."""
        if max(sequence.context for sequence in sequences) > self._capacity:
            return False
        self._masks.clear()
        self._slots.clear()
        ends = [sequence.context for sequence in sequences]
        one_each = self._padded is None and all(sequence.num_tokens == 1 for sequence in sequences)
        if one_each and all(end == last + 1 for end, last in zip(ends, self._ends, strict=True)):
            self._ends = ends
            self._positions += 1
            self._mask.scatter_(2, self._positions[:, None, None], 0.0)
        else:
            self._aim(sequences)
        return True

    def _aim(self, sequences: Sequence[ScheduledTokens]) -> None:
        """Mask and places of these tokens, whatever came before."""
        self._ends = [sequence.context for sequence in sequences]
        padding = Padding.of(sequences)
        hidden = torch.arange(self._capacity) > torch.from_numpy(padding.positions)[:, :, None]
        self._mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        requests, tokens = padding.positions.shape
        self._padded = None if tokens == 1 else torch.from_numpy(padding.rows)
        self._kept = None if padding.kept is None else torch.from_numpy(padding.kept)
        true = slice(None) if padding.kept is None else padding.kept
        self._requests = torch.from_numpy(np.repeat(np.arange(requests), tokens)[true])
        self._positions = torch.from_numpy(padding.positions.ravel()[true])

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query [T, H, D], rows [T, row_size] of this step's tokens -> [T, H, Dv], of rows' dtype."""
        kept = self._layers.get(layer.index)
        if kept is None:
            kept = self._copy(layer)
        else:
            self._append(layer, kept[0], rows)
        _, keys, values = kept
        query = query.to(self._dtype)
        if self._padded is None and layer.softcap is None and sinks is None:
            return attend_products(query, keys, values, layer, self._mask_of(layer)).to(rows.dtype)
        if self._padded is not None:
            query = query.index_select(0, self._padded)
        requests = self._mask.shape[0]
        query = query.unflatten(0, (requests, -1)).transpose(1, 2)
        shape = (requests, layer.num_kv_heads, self._capacity, -1)
        out = attend(query, keys.view(shape), values.view(shape), layer, self._mask[:, None], sinks=sinks)
        out = out.transpose(1, 2).flatten(0, 1)
        return (out if self._kept is None else out.index_select(0, self._kept)).to(rows.dtype)

    def _copy(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        both = self._store.copy(layer.index, self._places).to(self._dtype)
        keys, values = both.flatten(1, 2).unbind(0)
        kept = self._layers[layer.index] = (both.view(-1, layer.key_size), keys, values)
        return kept

    def _append(self, layer: LayerSpec, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        heads = layer.num_kv_heads
        slots = self._slots.get(heads)
        if slots is None:
            count = len(self._mask)
            lanes = torch.arange(2 * count * heads).view(2, count, heads) * self._capacity
            of_tokens = lanes.transpose(0, 1).index_select(0, self._requests)
            slots = self._slots[heads] = (of_tokens + self._positions[:, None, None]).reshape(-1)
        tokens.index_copy_(0, slots, rows.reshape(-1, layer.key_size).to(self._dtype))

    def _mask_of(self, layer: LayerSpec) -> torch.Tensor:
        """[R * KH, 1, capacity]"""
        mask = self._masks.get(layer.num_kv_heads)
        if mask is None:
            mask = self._masks[layer.num_kv_heads] = self._mask.repeat_interleave(layer.num_kv_heads, 0)
        return mask
