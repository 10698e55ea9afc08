"""KVCacheManager: the blocks of each request, and the prefixes that are worth keeping (engine.md C.6 to C.8)."""

from collections.abc import Sequence
from typing import NamedTuple

from llmkernel.engine.kv_cache.block import KVCacheBlock
from llmkernel.engine.kv_cache.block_hash import BlockHasher
from llmkernel.engine.kv_cache.block_pool import BlockPool
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.protocol.stats import PrefixCacheStats

__all__ = ["NO_PREFIX", "CachedPrefix", "KVCacheManager"]


class CachedPrefix(NamedTuple):
    """What the cache holds of a request. being_computed: another one of this very step computes the next block."""

    blocks: Sequence[KVCacheBlock] = ()
    num_tokens: int = 0
    being_computed: bool = False


NO_PREFIX = CachedPrefix()


class KVCacheManager:
    """Gives requests their blocks and takes them back; counts only, no tensors.

    A block is named in the prefix cache by `commit`, once its KV is really there, not when it is scheduled: a step that
    fails leaves nothing wrong behind, and no request reads what its own step still has to write. Requests with a common
    prefix that arrive together share it all the same: see CachedPrefix.being_computed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hash_new_blocks = BlockHasher(block_size) if enable_caching else None
        self.total_stats = PrefixCacheStats()
        self._stats = PrefixCacheStats()
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_committed: dict[str, int] = {}
        self._being_computed: set[bytes] = set()

    @property
    def capacity(self) -> int:
        """Tokens that one request alone can have KV for."""
        return self.pool.num_usable_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self._blocks.get(request.request_id, ())]

    def begin_step(self) -> None:
        """A new step is scheduled: nothing is being computed in it so far."""
        self._being_computed.clear()

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest run of cached blocks from the start. At least the last token is left to compute."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NO_PREFIX
        blocks: list[KVCacheBlock] = []
        being_computed = False
        limit = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:limit]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                being_computed = block_hash in self._being_computed
                break
            blocks.append(block)
        return CachedPrefix(blocks, len(blocks) * self.block_size, being_computed)

    def blocks_missing(self, request: Request, prefix: CachedPrefix) -> int:
        """Free blocks that the whole current sequence takes: new ones, and cached ones that nobody holds."""
        unheld = sum(block.ref_cnt == 0 for block in prefix.blocks)
        return self.blocks_for(request.num_tokens) - len(prefix.blocks) + unheld

    def adopt_prefix(self, request: Request, prefix: CachedPrefix) -> None:
        """The request, which holds nothing yet, holds the cached blocks from now on and has their tokens computed."""
        self.pool.touch(prefix.blocks)
        self._blocks[request.request_id] = list(prefix.blocks)
        self._num_committed[request.request_id] = len(prefix.blocks)
        request.num_computed_tokens = prefix.num_tokens
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self._record_lookup(request, prefix)

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Ids of new blocks for the next `num_new_tokens` tokens, [] if they have room; None if too few are free."""
        blocks = self._blocks[request.request_id]
        end = request.num_computed_tokens + num_new_tokens
        needed = self.blocks_for(end) - len(blocks)
        if needed > self.pool.num_free_blocks:
            return None
        if self.enable_caching:
            first = request.num_computed_tokens // self.block_size
            self._being_computed.update(request.block_hashes[first : end // self.block_size])
        if needed <= 0:
            return []
        new = self.pool.get_new_blocks(needed)
        blocks += new
        return [block.block_id for block in new]

    def commit(self, request: Request) -> None:
        """The step is through: blocks up to `num_computed_tokens` hold their KV; full ones can be shared."""
        if not self.enable_caching:
            return
        full = request.num_computed_tokens // self.block_size
        done = self._num_committed[request.request_id]
        if full <= done:
            return
        blocks = self._blocks[request.request_id]
        for index in range(done, full):
            self.pool.cache(blocks[index], request.block_hashes[index])
        self._num_committed[request.request_id] = full

    def free(self, request: Request) -> None:
        """Take every block back, the last one first, so that a sequence loses its end before its start."""
        blocks = self._blocks.pop(request.request_id, None)
        self._num_committed.pop(request.request_id, None)
        if blocks:
            self.pool.free(blocks[::-1])

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes. False while a request holds blocks."""
        done = self.pool.reset_cache()
        if done:
            self._stats.reset = True
        return done

    def take_stats(self) -> PrefixCacheStats:
        """Look-ups since the last call."""
        taken, self._stats = self._stats, PrefixCacheStats()
        return taken

    def held_blocks(self) -> dict[str, list[KVCacheBlock]]:
        """Blocks by request id, for checks."""
        return {request_id: list(blocks) for request_id, blocks in self._blocks.items()}

    def _record_lookup(self, request: Request, prefix: CachedPrefix) -> None:
        for stats in (self._stats, self.total_stats):
            if request.status is RequestStatus.PREEMPTED:
                stats.preempted_requests += 1
                stats.preempted_queries += request.num_tokens
                stats.preempted_hits += prefix.num_tokens
            else:
                stats.requests += 1
                stats.queries += request.num_tokens
                stats.hits += prefix.num_tokens
