"""Names of full blocks: a block's hash covers its tokens and, through its parent, everything before them.

    hash i = sha256(hash of block i-1 | token ids, 4 bytes little endian each | extra keys)

An extra key is its tag, its length and its bytes, so keys of different kinds, and different splits, never collide. The
only kind so far is the cache salt, in the first block alone; the chain carries it on.
"""

import hashlib
import struct

from llmkernel.engine.request import Request

__all__ = ["NONE_HASH", "BlockHasher"]

NONE_HASH = hashlib.sha256(b"llmkernel: parent of the first block").digest()
"""Parent of every first block. Fixed: sha256 needs no secret seed, and equal prefixes get equal names anywhere."""

_SALT_TAG = b"S"


class BlockHasher:
    """Appends to a request the hashes of the blocks that have become full. Safe from any thread: it holds no state."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack

    def __call__(self, request: Request) -> None:
        hashes, size = request.block_hashes, self._block_size
        full = len(request.all_token_ids) // size
        while len(hashes) < full:
            start = len(hashes) * size
            block = self._pack(*request.all_token_ids[start : start + size])
            parent = hashes[-1] if hashes else NONE_HASH
            hashes.append(hashlib.sha256(parent + block + _extra_keys(request, start)).digest())


def _extra_keys(request: Request, start: int) -> bytes:
    if start > 0 or request.cache_salt is None:
        return b""
    return _tagged(_SALT_TAG, request.cache_salt.encode("utf-8", "surrogatepass"))


def _tagged(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<I", len(value)) + value
