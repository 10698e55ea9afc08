"""The best entries of each row, exactly, in two stages."""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, gather_chunks

__all__ = ["pack_keys", "sort_keys", "top_entries", "unpack_keys"]


def top_entries(rows: torch.Tensor, maxima: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and int64 ids [rows, count] of the best entries of padded rows: larger first, lower id first among equals.

    maxima: their chunk_maxima. The `count` best lie in the `count` chunks with the best maxima (before anything in
    another chunk come those maxima themselves, `count` of them), so only these are looked at.
    """
    everything = torch.arange(max(rows.shape[1], maxima.shape[1]), dtype=torch.int32, device=rows.device)
    if maxima.shape[1] <= 2 * count:
        keys = pack_keys(rows, everything[: rows.shape[1]].expand_as(rows))
    else:
        chunk_keys = pack_keys(maxima, everything[: maxima.shape[1]].expand_as(maxima))
        _, chunks = unpack_keys(_largest(chunk_keys, count))
        ids = chunks.int().unsqueeze(-1) * CHUNK + everything[:CHUNK]
        keys = pack_keys(gather_chunks(rows, chunks).flatten(1), ids.flatten(1))
    return unpack_keys(sort_keys(_largest(keys, count)).flip(-1))


def pack_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort by float32 value, then by falling int32 id: no tie is left to chance. (-0 equals 0.)"""
    return torch.stack([~ids, _flip((values + 0.0).view(torch.int32))], dim=-1).view(torch.int64).squeeze(-1)


def unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values (-0 as 0) and the ids, as int64, of keys."""
    low, high = keys.contiguous().view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    return _flip(high).view(torch.float32), (~low).to(torch.int64)


def sort_keys(keys: torch.Tensor) -> torch.Tensor:
    """Ascending along the last dimension, in place on a CPU: NumPy's vectorised sort is ten times as fast as torch's there."""
    if keys.device.type != "cpu":
        return keys.sort(-1).values
    keys.numpy().sort(axis=-1)
    return keys


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, in any order. The keys are reordered on a CPU."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1, sorted=False).values
    keys.numpy().partition(keys.shape[1] - count, axis=-1)
    return keys[:, keys.shape[1] - count :].contiguous()


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the negative numbers: from sign and magnitude to two's complement, and back."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
