"""The best entries of each row, exactly, in two stages."""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK

__all__ = ["top_entries"]

_LOW = 2**32 - 1


def top_entries(rows: torch.Tensor, maxima: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [rows, count] of the best entries of padded rows: larger value first, lower id among equal values.

    maxima: their chunk_maxima. The `count` best lie in the `count` chunks with the best maxima (a chunk left out has
    `count` entries before its own best, one in each chunk that was taken), so only those are looked at.
    """
    if maxima.shape[1] <= 2 * count:
        candidates, ids = rows, torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    else:
        _, chunks = _best(maxima, torch.arange(maxima.shape[1], device=rows.device).expand_as(maxima), count)
        index = chunks.unsqueeze(-1).expand(-1, -1, CHUNK)
        candidates = rows.unflatten(-1, (-1, CHUNK)).gather(1, index).flatten(1)
        ids = (chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=rows.device)).flatten(1)
    return _best(candidates, ids, count)


def _best(values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted by (value descending, id ascending): both are packed into one int64 key, so that no tie is left to chance."""
    keys = (_ordered(values).to(torch.int64) << 32) | (_LOW - ids)
    best = keys.topk(count, dim=-1).values
    return _flip((best >> 32).to(torch.int32)).view(torch.float32), _LOW - (best & _LOW)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 as int32 that compare alike; adding 0 makes -0 and +0 the same."""
    return _flip((values + 0.0).view(torch.int32))


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the negative numbers: from sign and magnitude to two's complement, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
