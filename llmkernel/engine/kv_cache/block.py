"""KVCacheBlock: what is known about one block of the KV pool. The tensors are the worker's business."""

__all__ = ["NULL_BLOCK_ID", "KVCacheBlock"]

NULL_BLOCK_ID = 0
"""The block that is never handed out: a placeholder for positions without KV."""


class KVCacheBlock:
    """One block of the pool.

    ref_cnt: requests that hold it. block_hash: of the full block that it caches, None while it caches nothing.
    prev_free and next_free link it into the FreeBlockQueue while nobody holds it; only the queue touches them.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={cached})"
