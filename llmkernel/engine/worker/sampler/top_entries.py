"""The best entries of each row, exactly, without sorting the row."""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, gather_chunks

__all__ = ["pack_keys", "sort_keys", "top_entries", "unpack_keys"]

_PART = 16


def top_entries(rows: torch.Tensor, maxima: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and int64 ids [rows, count] of the best entries of padded rows: larger first, lower id first among equals.

    maxima: their chunk_maxima. The `count` best lie in the `count` chunks with the best maxima (before anything in
    another chunk come those maxima themselves, `count` of them). So chunks are narrowed down, then parts of chunks.
    """
    chunks, size = torch.arange(maxima.shape[1], device=rows.device).expand_as(maxima), CHUNK
    if maxima.shape[1] > 2 * count:
        chunks = _best_ids(maxima, chunks, count)
        part_maxima = gather_chunks(rows, chunks).unflatten(-1, (-1, _PART)).amax(-1).flatten(1)
        chunks, size = _best_ids(part_maxima, _spread(chunks, CHUNK // _PART), count), _PART
    keys = pack_keys(gather_chunks(rows, chunks, size).flatten(1), _spread(chunks, size))
    return unpack_keys(sort_keys(_largest(keys, count)).flip(-1))


def pack_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort by float32 value, then by falling id: no tie is left to chance. (-0 equals 0.)"""
    low, high = ~ids.to(torch.int32), _flip((values + 0.0).view(torch.int32))
    return torch.stack([low, high], dim=-1).view(torch.int64).squeeze(-1)


def unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values (-0 as 0) and the ids, as int64, of keys."""
    low, high = keys.contiguous().view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    return _flip(high).view(torch.float32), (~low).to(torch.int64)


def sort_keys(keys: torch.Tensor) -> torch.Tensor:
    """Ascending along the last dimension; in place on a CPU, where NumPy's vectorised sort is ten times torch's."""
    if keys.device.type != "cpu":
        return keys.sort(-1).values
    keys.numpy().sort(axis=-1)
    return keys


def _best_ids(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    return unpack_keys(_largest(pack_keys(values, ids), count))[1]


def _spread(ids: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, n * size]: for each of the ids [rows, n] those of its `size` parts."""
    return (ids.unsqueeze(-1) * size + torch.arange(size, device=ids.device)).flatten(1)


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, in any order. The keys are reordered on a CPU."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1, sorted=False).values
    keys.numpy().partition(keys.shape[1] - count, axis=-1)
    return keys[:, keys.shape[1] - count :].contiguous()


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the negative numbers: from sign and magnitude to two's complement, and back."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
