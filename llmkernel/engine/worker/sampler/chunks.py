"""Rows of logits cut into chunks of 64: reductions in two stages, which on a CPU cost a fraction of the flat ones.

A padded row is float32, its length a multiple of CHUNK, -inf beyond the vocabulary. Sums go chunk by chunk, in an order
that does not depend on the other rows: a row gives the same bits alone and in any batch.
"""

import torch

__all__ = ["CHUNK", "Scratch", "chunk_masses", "chunk_maxima", "exp_weights", "gather_chunks", "pad_rows"]

CHUNK = 64
_BLOCK = 2**18
"""Elements at a time, so that what is computed in between stays in the cache."""


class Scratch:
    """Memory for padded rows that is used again by the next step: fresh pages cost more than filling them."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.float32, device=device)

    def rows(self, count: int, length: int) -> torch.Tensor:
        """float32 [count, length], of any content; it is valid until the next call."""
        if self._flat.numel() < count * length:
            self._flat = torch.empty(count * length, dtype=torch.float32, device=self._flat.device)
        return self._flat[: count * length].view(count, length)


def pad_rows(rows: torch.Tensor, scratch: Scratch | None = None, *, copy: bool = False) -> torch.Tensor:
    """`rows` (any float type) as padded rows: themselves if they are that already and no copy is asked for."""
    count, size = rows.shape
    length = -(-size // CHUNK) * CHUNK
    if rows.dtype == torch.float32 and size == length and rows.is_contiguous() and not copy:
        return rows
    padded = (scratch or Scratch(rows.device)).rows(count, length)
    padded[:, :size] = rows
    padded[:, size:] = -torch.inf
    return padded


def chunk_maxima(rows: torch.Tensor) -> torch.Tensor:
    """[rows, chunks]: the maximum of each chunk, NaN if it holds one. The rows need not be padded."""
    whole = rows.shape[1] // CHUNK * CHUNK
    maxima = rows[:, :whole].unflatten(1, (-1, CHUNK)).amax(-1)
    if whole == rows.shape[1]:
        return maxima
    return torch.cat([maxima, rows[:, whole:].amax(-1, keepdim=True)], dim=1)


def gather_chunks(rows: torch.Tensor, chunks: torch.Tensor, size: int = CHUNK) -> torch.Tensor:
    """[rows, n, size]: the chunks of that size, by their numbers [rows, n], of padded rows."""
    first = torch.arange(len(rows), device=rows.device).unsqueeze(-1) * (rows.shape[1] // size)
    return rows.view(-1, size).index_select(0, (first + chunks).flatten()).view(*chunks.shape, size)


def exp_weights(logits: torch.Tensor, row_max: torch.Tensor, inverse_temperatures: torch.Tensor) -> torch.Tensor:
    """exp((logits - row_max) / temperature), float32: unnormalised probabilities, 1 for the best token.

    row_max, inverse_temperatures: float32, one per row, of shapes that broadcast.
    """
    return torch.sub(logits, row_max).mul_(inverse_temperatures).exp_()


def chunk_masses(rows: torch.Tensor, row_max: torch.Tensor, inverse_temperatures: torch.Tensor) -> torch.Tensor:
    """float64 [rows, chunks]: the sums of exp_weights over the chunks of padded rows. The other two are [rows, 1]."""
    step = max(1, _BLOCK // rows.shape[1])
    masses = torch.empty((len(rows), rows.shape[1] // CHUNK), dtype=torch.float32, device=rows.device)
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        weights = exp_weights(rows[block], row_max[block], inverse_temperatures[block])
        torch.sum(weights.unflatten(1, (-1, CHUNK)), -1, out=masses[block])
    return masses.to(torch.float64)
