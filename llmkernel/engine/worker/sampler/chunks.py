"""Rows of logits cut into chunks of 64: reductions in two stages, which on a CPU cost a fraction of the flat ones.

A padded row is float32, its length a multiple of CHUNK, -inf beyond the vocabulary. Sums go chunk by chunk in an order
that does not depend on the other rows, so that a row gives the same bits alone and in any batch.
"""

import torch

__all__ = ["CHUNK", "chunk_maxima", "exp_weights", "pad_rows", "padded_length"]

CHUNK = 64


def padded_length(vocab_size: int) -> int:
    """`vocab_size` rounded up to whole chunks."""
    return -(-vocab_size // CHUNK) * CHUNK


def chunk_maxima(rows: torch.Tensor) -> torch.Tensor:
    """[rows, chunks]: the maximum of each chunk. The rows may be of any length; NaN spreads."""
    whole = rows.shape[-1] // CHUNK * CHUNK
    maxima = rows[:, :whole].unflatten(-1, (-1, CHUNK)).amax(-1)
    if whole == rows.shape[-1]:
        return maxima
    return torch.cat([maxima, rows[:, whole:].amax(-1, keepdim=True)], dim=-1)


def pad_rows(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` as padded float32 rows of their own; themselves if they are so already and `out` is None."""
    length = padded_length(rows.shape[1])
    if out is None:
        if rows.dtype == torch.float32 and rows.shape[1] == length and rows.is_contiguous():
            return rows
        out = rows.new_empty((rows.shape[0], length), dtype=torch.float32)
    out[:, : rows.shape[1]] = rows
    out[:, rows.shape[1] :] = -torch.inf
    return out


def exp_weights(
    rows: torch.Tensor, row_max: torch.Tensor, temperatures: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """exp((rows - row_max) / temperature) of padded rows: unnormalised probabilities, 1 for the best token.

    row_max, temperatures: float32 [rows, 1]. out: float32 of the shape of rows, where the result goes.
    """
    weights = torch.sub(rows, row_max, out=out)
    return weights.div_(temperatures).exp_()
