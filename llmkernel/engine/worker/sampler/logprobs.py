"""Log-probabilities of chosen tokens and of the best alternatives: pure functions, for samples and prompts alike."""

from typing import Literal

import numpy as np
import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, chunk_masses, chunk_maxima, gather_chunks, pad_rows
from llmkernel.engine.worker.sampler.top_entries import top_entries
from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["LogprobsMode", "gather_logprobs"]

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""raw: of the model's logits. processed: of what was drawn from, after penalties, masks, temperature and truncation."""

_BLOCK = 16
"""Rows at a time: bounds the memory that long prompts take."""


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    count: int,
    *,
    others: torch.Tensor | None = None,
    normalise: bool = True,
) -> LogprobsLists:
    """LogprobsLists of `logits` [positions, vocab] (any float type, not changed) and of the int64 ids chosen there.

    count: how many of the best follow the chosen token, larger first, lower id first among equals; 0 = none, the chosen
    token alone; -1 = the whole vocabulary, in order of ids. The rank of the chosen token is the number of entries with
    a value at least its own. For prompt logprobs, row i is what the model says after token i, and token_ids[i] is token
    i + 1. others: int64 ids that follow the chosen token in place of the best. normalise False gives the logits
    themselves.
    """
    blocks = [
        _gather_block(rows, chosen.unsqueeze(-1), count, others, normalise)
        for rows, chosen in zip(logits.split(_BLOCK), token_ids.split(_BLOCK), strict=True)
    ]
    ids, values, ranks = (torch.cat(parts).cpu().numpy() for parts in zip(*blocks, strict=True))
    return LogprobsLists(ids.astype(np.int32), values, ranks.astype(np.int32))


def _gather_block(
    logits: torch.Tensor, chosen: torch.Tensor, count: int, others: torch.Tensor | None, normalise: bool
) -> tuple[torch.Tensor, ...]:
    rows = pad_rows(logits)
    maxima = chunk_maxima(rows)
    values = rows.gather(1, chosen)
    ranks = _ranks(rows, maxima, values)
    ids, vocab_size = chosen, logits.shape[1]
    if others is not None:
        ids = torch.cat([ids, others.expand(len(rows), -1)], dim=1)
        values = rows.gather(1, ids)
    elif count < 0:
        ids = torch.cat([ids, torch.arange(vocab_size, device=rows.device).expand(len(rows), -1)], dim=1)
        values = torch.cat([values, rows[:, :vocab_size]], dim=1)
    elif count:
        best, best_ids = top_entries(rows, maxima, min(count, vocab_size))
        ids, values = torch.cat([ids, best_ids], dim=1), torch.cat([values, best], dim=1)
    if not normalise:
        return ids, values, ranks
    row_max = maxima.amax(-1, keepdim=True)
    masses = chunk_masses(rows, row_max, torch.ones_like(row_max)).sum(-1, keepdim=True)
    return ids, values - row_max - masses.log().float(), ranks


def _ranks(rows: torch.Tensor, maxima: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: entries of at least `values` [rows, 1]; only chunks whose maximum reaches it are looked at."""
    row, chunk = (maxima >= values).nonzero().unbind(-1)
    flat = rows.view(1, -1)
    chunks = gather_chunks(flat, (row * (rows.shape[1] // CHUNK) + chunk).unsqueeze(0)).squeeze(0)
    hits = (chunks >= values[row]).sum(-1)
    return torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add_(0, row, hits)
