"""BlockPool: every block of KV memory, who holds it, what it caches (engine.md C.7)."""

from collections.abc import Iterable, Sequence

from llmkernel.engine.kv_cache.block import NULL_BLOCK_ID, KVCacheBlock
from llmkernel.engine.kv_cache.cached_blocks import CachedBlocks
from llmkernel.engine.kv_cache.free_block_queue import FreeBlockQueue

__all__ = ["BlockPool"]


class BlockPool:
    """Owns the blocks. Free blocks keep what they cache until they are reused (lazy eviction).

    Block 0 is the null block: never free, never handed out, so `num_usable_blocks` is one less than the pool has.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"A KV pool needs at least 2 blocks (one is the null block), not {num_blocks}.")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_cnt = 1
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self._cached = CachedBlocks()

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    @property
    def num_used_blocks(self) -> int:
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_hashes(self) -> int:
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        return self._cached.get(block_hash)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """`count` blocks, held once, caching nothing. ValueError if fewer are free."""
        blocks = self.free_queue.pop_front(count)
        for block in blocks:
            self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more request holds each of `blocks`."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """`block` now holds the KV of `block_hash`, for everybody."""
        if block.block_hash is None:
            block.block_hash = block_hash
            self._cached.add(block)

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One request fewer holds each of `blocks`; pass them in the order in which they should be reused.

        Blocks that cache nothing go to the front (their memory is still warm), the others to the end.
        """
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"{block} is freed more often than it is held.")
            block.ref_cnt -= 1
        released = [block for block in blocks if block.ref_cnt == 0]
        self.free_queue.extend_front([block for block in released if block.block_hash is None])
        self.free_queue.extend([block for block in released if block.block_hash is not None])

    def reset_cache(self) -> bool:
        """Forget everything that is cached. False, and nothing is done, while a request holds a block."""
        if self.num_used_blocks:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._cached.remove(block)
            block.block_hash = None
