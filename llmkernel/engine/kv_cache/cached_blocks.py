"""CachedBlocks: which blocks hold the KV of which hash."""

from llmkernel.engine.kv_cache.block import KVCacheBlock

__all__ = ["CachedBlocks"]


class CachedBlocks:
    """Hash -> blocks that cache it. A value is the one block, or a dict by id where there are more.

    Duplicates are allowed: block tables only grow, so two requests that filled the same content at the same time both
    keep their block.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Distinct hashes."""
        return len(self._blocks)

    def get(self, block_hash: bytes) -> KVCacheBlock | None:
        """One of the blocks that cache `block_hash`, always the oldest."""
        found = self._blocks.get(block_hash)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def add(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        found = self._blocks.setdefault(block.block_hash, block)
        if isinstance(found, dict):
            found[block.block_id] = block
        elif found is not block:
            self._blocks[block.block_hash] = {found.block_id: found, block.block_id: block}

    def remove(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        found = self._blocks.get(block.block_hash)
        if isinstance(found, dict):
            found.pop(block.block_id, None)
            if not found:
                del self._blocks[block.block_hash]
        elif found is block:
            del self._blocks[block.block_hash]

    def clear(self) -> None:
        self._blocks.clear()
