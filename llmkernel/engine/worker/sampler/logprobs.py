"""Log-probabilities of chosen tokens and of the best alternatives; pure functions, for samples and prompts alike."""

import numpy as np
import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, chunk_maxima, exp_weights, pad_rows
from llmkernel.engine.worker.sampler.top_entries import top_entries
from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["gather_logprobs"]

_BLOCK = 16
"""Rows at a time: bounds the memory of long prompts."""


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int, *, normalise: bool = True
) -> LogprobsLists:
    """LogprobsLists of `logits` [positions, vocab] (any float type, not changed) and the int64 `token_ids` chosen there.

    count: how many of the best follow the chosen token, larger first, lower id first among equal values; 0 = the chosen
    alone; -1 = the whole vocabulary in order of ids. The rank of the chosen is the number of entries with a value at
    least its own. normalise False leaves the values as they are (the modes "*_logits"). For the prompt, position i holds
    the logits that follow token i, and token_ids the tokens from the second on.
    """
    blocks = [
        _gather_block(pad_rows(rows), rows.shape[1], chosen, count, normalise)
        for rows, chosen in zip(logits.split(_BLOCK), token_ids.split(_BLOCK), strict=True)
    ]
    if not blocks:
        width = 1 + (logits.shape[1] if count < 0 else count)
        return LogprobsLists(np.zeros((0, width), np.int32), np.zeros((0, width), np.float32), np.zeros(0, np.int32))
    ids, values, ranks = (torch.cat(parts).cpu().numpy() for parts in zip(*blocks, strict=True))
    return LogprobsLists(ids, values, ranks)


def _log_normaliser(rows: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """float32 [rows, 1]: the logarithm of the sum of the exponentials of padded rows."""
    row_max = maxima.amax(-1, keepdim=True)
    weights = exp_weights(rows, row_max, torch.ones_like(row_max))
    return row_max + weights.unflatten(-1, (-1, CHUNK)).sum(-1).sum(-1, keepdim=True, dtype=torch.float64).log().float()


def _gather_block(
    rows: torch.Tensor, vocab_size: int, chosen: torch.Tensor, count: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    maxima = chunk_maxima(rows)
    chosen = chosen.unsqueeze(-1)
    values = rows.gather(1, chosen)
    ranks = (rows >= values).sum(-1, dtype=torch.int32)
    ids = chosen
    if count < 0:
        everything = torch.arange(vocab_size, device=rows.device).expand(len(rows), -1)
        ids, values = torch.cat([chosen, everything], -1), torch.cat([values, rows[:, :vocab_size]], -1)
    elif count:
        best, best_ids = top_entries(rows, maxima, min(count, vocab_size))
        ids, values = torch.cat([chosen, best_ids], -1), torch.cat([values, best], -1)
    if normalise:
        values = values - _log_normaliser(rows, maxima)
    return ids.to(torch.int32), values, ranks
