"""FreeBlockQueue: the blocks that nobody holds, in the order in which they are reused."""

from collections.abc import Iterable, Iterator, Sequence

from llmkernel.engine.kv_cache.block import KVCacheBlock

__all__ = ["FreeBlockQueue"]


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: O(1) removal from the middle, and no allocations.

    The front is reused first, so the order is the order of eviction: least recently used first.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self._count = 0
        self.extend(list(blocks))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def pop_front(self, count: int) -> list[KVCacheBlock]:
        """The first `count` blocks, taken out. ValueError if there are fewer."""
        if count > self._count:
            raise ValueError(f"{count} blocks asked for, {self._count} free.")
        taken = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        if taken:
            assert block is not None
            self._link(self._head, block)
            self._count -= count
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out, wherever it stands. ValueError if it is not in the queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not free.")
        self._link(before, after)
        block.prev_free = block.next_free = None
        self._count -= 1

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the end, in their order: they are reused last."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, blocks, self._tail)

    def extend_front(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the front, in their order: they are reused first."""
        assert self._head.next_free is not None
        self._insert(self._head, blocks, self._head.next_free)

    def _insert(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            self._link(before, block)
            before = block
        self._link(before, after)
        self._count += len(blocks)

    @staticmethod
    def _link(before: KVCacheBlock, after: KVCacheBlock) -> None:
        before.next_free, after.prev_free = after, before
