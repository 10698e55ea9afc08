"""Where keys and values lie. The scheduler counts blocks; this is what they are made of."""

import abc
import mmap
from collections import Counter
from collections.abc import Sequence

import torch

from llmkernel.engine.worker.attention import LayerSpec

__all__ = ["KVStore", "PagedKVStore"]


class KVStore(abc.ABC):
    """Keys and values of all layers, addressed by block id and offset. One owner: the model runner.

    A store may keep more than the pool (dense rows of running requests, say): admit and release tell it who runs.
    """

    num_blocks: int
    block_size: int
    num_bytes: int

    @abc.abstractmethod
    def admit(self, req_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """A request starts or resumes: its first `num_computed_tokens` tokens are in these blocks already."""

    @abc.abstractmethod
    def release(self, req_id: str) -> None:
        """A request stopped running (finished or preempted). Its blocks keep their content: others may share them."""

    @abc.abstractmethod
    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks: what a former owner left behind must never be read, not even under a mask (NaN)."""

    @abc.abstractmethod
    def write(self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [T, row_size] (keys, then values, of one token) at (block, offset) [T] of `layer`."""

    @abc.abstractmethod
    def gather(self, layer: int, block_ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_rows, KH, C, D] and values of consecutive blocks: block_ids [num_rows * C / block_size].

        Views of memory that the next gather overwrites.
        """


class PagedKVStore(KVStore):
    """A pool of keys and one of values; a block holds its tokens of all layers: [block, layer, head, offset, size].

    So a running request commits memory as it grows (pages are zero and cost nothing until they are written), and a
    block is cleared at once. Head by head, because what is gathered then lies as the batched product wants it: no copy
    but the gather itself (measured: 1.3 to 1.5 times as fast as token by token). Layers of different shapes (mixed head
    sizes) get pools per shape. Block 0 is the null block: never written, it pads the tables of shorter requests, so
    padding reads zeros.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = list(layers)
        self._shapes = [(layer.num_kv_heads, layer.key_size, layer.value_size) for layer in layers]
        self._depth = Counter(self._shapes)
        self._place: list[int] = []
        seen: Counter[tuple[int, int, int]] = Counter()
        for shape in self._shapes:
            self._place.append(seen[shape])
            seen[shape] += 1
        self._pools = {
            shape: [_Pool(num_blocks * depth * shape[0], block_size, size, dtype, device) for size in shape[1:]]
            for shape, depth in self._depth.items()
        }
        self.num_bytes = sum(pool.memory.nbytes for pair in self._pools.values() for pool in pair)
        heads = {shape[0] for shape in self._shapes}
        self._heads = {count: torch.arange(count, device=device) for count in heads}

    def admit(self, req_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Nothing to do: the pool is the only copy."""

    def release(self, req_id: str) -> None:
        """Nothing to do: blocks belong to the scheduler."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        index = torch.tensor(block_ids, device=next(iter(self._heads.values())).device)
        for pair in self._pools.values():
            for pool in pair:
                pool.memory.view(self.num_blocks, -1).index_fill_(0, index, 0)

    def write(self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        shape = heads, key_size, value_size = self._shapes[layer]
        keys, values = self._pools[shape]
        slots = (self._first_rows(layer, block_ids)[:, None] + self._heads[heads]) * self.block_size + offsets[:, None]
        slots = slots.view(-1)
        split = heads * key_size
        keys.memory.view(-1, key_size).index_copy_(0, slots, rows[:, :split].reshape(-1, key_size))
        values.memory.view(-1, value_size).index_copy_(0, slots, rows[:, split:].reshape(-1, value_size))

    def gather(self, layer: int, block_ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shapes[layer]
        first = self._first_rows(layer, block_ids).view(num_rows, 1, -1)
        index = (first + self._heads[shape[0]][:, None]).view(-1)
        keys, values = (pool.take(index).view(num_rows, shape[0], -1, pool.size) for pool in self._pools[shape])
        return keys, values

    def _first_rows(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Where the first head of `layer` lies in these blocks, counted in rows of block_size tokens."""
        shape = self._shapes[layer]
        return (block_ids * self._depth[shape] + self._place[layer]) * shape[0]


class _Pool:
    """Keys or values: memory [rows, block_size * size], a row for each block, layer and head."""

    def __init__(self, rows: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.memory = _zeros(rows * block_size * size, dtype, device).view(rows, block_size * size)
        self._taken = torch.empty(0, dtype=dtype, device=device)

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """These rows, side by side, in memory that the next take overwrites."""
        wanted = len(index) * self.memory.shape[1]
        if self._taken.numel() < wanted:
            self._taken = self._taken.new_empty(wanted + wanted // 4)
        out = self._taken[:wanted].view(len(index), -1)
        return torch.index_select(self.memory, 0, index, out=out)


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
