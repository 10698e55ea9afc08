"""Where keys and values lie. The scheduler counts blocks; this is what they are made of."""

import abc
import dataclasses
import mmap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmkernel.engine.worker.attention import LayerSpec

__all__ = ["KVStore", "Lanes", "PagedKVStore", "Places", "Slots"]

Slots = list[tuple[torch.Tensor, ...]]
"""Where the rows of a step go, per layer: made once per step by KVStore.slots, for write."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the blocks of some requests lie, per layer: made once per step by KVStore.places, for gather."""

    num_rows: int
    rows: Slots


class Lanes(NamedTuple):
    """address: of the layer in block 0. block_stride: bytes from there to the same layer in block 1.

    A block has a lane per key head, then one per value head, each [block_size, D], one behind the other.
    """

    address: int
    block_stride: int


class KVStore(abc.ABC):
    """Keys and values of all layers, addressed by block id and offset. One owner: the model runner."""

    num_blocks: int
    block_size: int
    num_bytes: int

    @abc.abstractmethod
    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks: what a former owner left behind must never be read, not even under a mask (NaN)."""

    @abc.abstractmethod
    def slots(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> Slots:
        """Of tokens at (block, offset), int64 [T] each."""

    @abc.abstractmethod
    def write(self, layer: int, slots: Slots, rows: torch.Tensor) -> None:
        """Put rows [T, row_size] (keys, then values, of one token) there."""

    @abc.abstractmethod
    def places(self, block_ids: torch.Tensor) -> Places:
        """Of consecutive blocks of R requests, int64 [R, blocks]."""

    @abc.abstractmethod
    def gather(self, layer: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [R, KH, C, D] and values [R, KH, C, Dv] of these blocks, in memory that the next gather overwrites."""

    @abc.abstractmethod
    def lanes(self, layer: int) -> "Lanes | None":
        """Where a layer lies, for a kernel that reads and writes it itself; None: keys and values lie apart."""

    @abc.abstractmethod
    def copy(self, layer: int, places: Places) -> torch.Tensor:
        """Keys and values [2, R, KH, C, D] of these blocks, in memory of their own; both must be of one size."""


class PagedKVStore(KVStore):
    """A pool in which a block holds its tokens of all layers: [block, layer, lane, offset, size], a lane per key head
    and per value head.

    So a running request commits memory as it grows (pages are zero and cost nothing until they are written), and a
    block is cleared at once. Lane by lane, because what is gathered then lies as the batched product wants it: no copy
    but the gather itself (measured: 1.3 to 1.5 times as fast as token by token). Layers of different shapes (mixed head
    sizes) get pools per shape, and where values are of another size than keys each gets its own. Block 0 is the null
    block: never written, it pads the tables of shorter requests, so padding reads zeros.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._heads = [layer.num_kv_heads for layer in layers]
        shapes = [(layer.num_kv_heads, layer.key_size, layer.value_size) for layer in layers]
        depths = Counter(shapes)
        self._pools = {
            shape: [_Pool(num_blocks, depth, lanes, block_size, size, dtype, device) for lanes, size in _lanes(*shape)]
            for shape, depth in depths.items()
        }
        self._of_layer = [self._pools[shape] for shape in shapes]
        self._depth_of_layer: list[int] = []
        seen: Counter[tuple[int, int, int]] = Counter()
        for shape in shapes:
            self._depth_of_layer.append(seen[shape])
            seen[shape] += 1
        self._lanes = [
            pools[0].lanes_of(depth) if len(pools) == 1 else None
            for pools, depth in zip(self._of_layer, self._depth_of_layer, strict=True)
        ]
        self.num_bytes = sum(pool.memory.nbytes for pools in self._pools.values() for pool in pools)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        for pools in self._pools.values():
            for pool in pools:
                blocks = pool.memory.view(self.num_blocks, -1)
                for block_id in block_ids:  # index_fill_ takes 3 ms for one block, on two cores
                    blocks[block_id].zero_()

    def slots(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> Slots:
        slots = {id(pool): pool.slots(block_ids, offsets) for pools in self._pools.values() for pool in pools}
        return self._per_layer(slots)

    def write(self, layer: int, slots: Slots, rows: torch.Tensor) -> None:
        pools = self._of_layer[layer]
        if len(pools) == 1:
            pools[0].put(slots[layer][0], rows)
            return
        keys, values = pools
        split = keys.lanes * keys.size
        keys.put(slots[layer][0], rows[:, :split])
        values.put(slots[layer][1], rows[:, split:])

    def places(self, block_ids: torch.Tensor) -> Places:
        rows = {
            id(pool): pool.rows(block_ids, kinds=3 - len(pools)) for pools in self._pools.values() for pool in pools
        }
        return Places(block_ids.shape[0], self._per_layer(rows))

    def gather(self, layer: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        pools, indices, shape = self._of_layer[layer], places.rows[layer], (places.num_rows, self._heads[layer], -1)
        if len(pools) == 1:
            keys, values = pools[0].take(indices[0]).view(2, *shape, pools[0].size).unbind(0)
        else:
            keys, values = (
                pool.take(index).view(*shape, pool.size) for pool, index in zip(pools, indices, strict=True)
            )
        return keys, values

    def lanes(self, layer: int) -> Lanes | None:
        return self._lanes[layer]

    def copy(self, layer: int, places: Places) -> torch.Tensor:
        (pool,) = self._of_layer[layer]
        copied = pool.memory.index_select(0, places.rows[layer][0])
        return copied.view(2, places.num_rows, self._heads[layer], -1, pool.size)

    def _per_layer(self, of_pool: dict[int, tuple[torch.Tensor, ...]]) -> Slots:
        return [
            tuple(of_pool[id(pool)][depth] for pool in pools)
            for pools, depth in zip(self._of_layer, self._depth_of_layer, strict=True)
        ]


class _Pool:
    """Memory [rows, block_size * size], a row for each block, layer and lane."""

    def __init__(
        self, blocks: int, depth: int, lanes: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lanes = lanes
        self.size = size
        self._depth = depth
        self._block_size = block_size
        self.memory = _zeros(blocks * depth * lanes * block_size * size, dtype, device).view(-1, block_size * size)
        self._tokens = self.memory.view(-1, size)
        self._lane = torch.arange(lanes, device=device)
        self._layer = torch.arange(depth, device=device)[:, None] * lanes
        self._taken = torch.empty(0, dtype=dtype, device=device)

    def lanes_of(self, depth: int) -> Lanes:
        """Of the layer that is number `depth` of this pool."""
        layer = self.lanes * self.memory.shape[1] * self.memory.itemsize
        return Lanes(self.memory.data_ptr() + depth * layer, self._depth * layer)

    def slots(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per layer: places of tokens, [T * lanes]."""
        first = block_ids * (self._depth * self.lanes * self._block_size) + offsets
        lanes = (first[:, None] + self._lane * self._block_size).view(1, -1)
        return (lanes + self._layer * self._block_size).unbind(0)

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [T, lanes * size]."""
        self._tokens.index_copy_(0, slots, rows.reshape(-1, self.size))

    def rows(self, block_ids: torch.Tensor, *, kinds: int) -> tuple[torch.Tensor, ...]:
        """Per layer: rows of blocks [R, n], as [kinds, R, lanes / kinds, n], flat. kinds 2: keys, then values."""
        first = block_ids[:, None] * (self._depth * self.lanes)
        rows = (first + self._lane.view(kinds, 1, -1, 1)).view(1, -1)
        return (rows + self._layer).unbind(0)

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """These rows, side by side, in memory that the next take overwrites."""
        wanted = len(index) * self.memory.shape[1]
        if self._taken.numel() < wanted:
            self._taken = self._taken.new_empty(wanted + wanted // 4)
        out = self._taken[:wanted].view(len(index), -1)
        return torch.index_select(self.memory, 0, index, out=out)


def _lanes(heads: int, key_size: int, value_size: int) -> list[tuple[int, int]]:
    """(lanes, size) of the pools of a shape: one for keys and values where they are of one size."""
    return [(2 * heads, key_size)] if key_size == value_size else [(heads, key_size), (heads, value_size)]


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` zeros; on the CPU as fresh private pages, which the system commits one by one when they are touched."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    item = torch.empty(0, dtype=dtype).element_size()
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, count * item, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
