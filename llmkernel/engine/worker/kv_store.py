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
    """One pool; a block holds its tokens of all layers side by side: [block, layer, offset, keys + values].

    So a running request commits memory as it grows (pages are zero and cost nothing until they are written), and a
    block is cleared at once. Layers with rows of different size (mixed head sizes) get a pool per size. Block 0 is the
    null block: never written, it pads the tables of shorter requests, so padding reads zeros.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = list(layers)
        self._depth = Counter(layer.row_size for layer in layers)
        self._place: list[int] = []
        seen: Counter[int] = Counter()
        for layer in layers:
            self._place.append(seen[layer.row_size])
            seen[layer.row_size] += 1
        self._pools = {
            size: _zeros(num_blocks * depth * block_size * size, dtype, device) for size, depth in self._depth.items()
        }
        self.num_bytes = sum(pool.numel() * pool.element_size() for pool in self._pools.values())
        self._scratch = {size: torch.empty(0, dtype=dtype, device=device) for size in self._pools}

    def admit(self, req_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Nothing to do: the pool is the only copy."""

    def release(self, req_id: str) -> None:
        """Nothing to do: blocks belong to the scheduler."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        index = torch.tensor(block_ids, device=next(iter(self._pools.values())).device)
        for pool in self._pools.values():
            pool.view(self.num_blocks, -1).index_fill_(0, index, 0)

    def write(self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        size = self._layers[layer].row_size
        slots = (block_ids * self._depth[size] + self._place[layer]) * self.block_size + offsets
        self._pools[size].view(-1, size).index_copy_(0, slots, rows)

    def gather(self, layer: int, block_ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._layers[layer]
        size, heads = spec.row_size, spec.num_kv_heads
        index = block_ids * self._depth[size] + self._place[layer]
        wanted = len(index) * self.block_size * size
        if self._scratch[size].numel() < wanted:
            self._scratch[size] = self._scratch[size].new_empty(wanted + wanted // 4)
        out = self._scratch[size][:wanted].view(len(index), -1)
        torch.index_select(self._pools[size].view(-1, self.block_size * size), 0, index, out=out)
        rows = out.view(num_rows, -1, size)
        keys, values = rows.split((heads * spec.key_size, heads * spec.value_size), -1)
        return keys.unflatten(-1, (heads, -1)).transpose(1, 2), values.unflatten(-1, (heads, -1)).transpose(1, 2)


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
