"""What changes logits before temperature, in place: biases, penalties, and last the hard masks."""

import torch

from llmkernel.engine.worker.sampler.masks import add_bias, forbid, keep_allowed, keep_only
from llmkernel.engine.worker.sampler.penalties import apply_penalties
from llmkernel.engine.worker.sampler.row import Row

__all__ = ["apply_biases", "apply_masks", "penalise"]


def apply_biases(padded: torch.Tensor, rows: list[Row]) -> None:
    """logit_bias; padded[n] belongs to rows[n]."""
    if biases := [(n, *row.state.bias) for n, row in enumerate(rows) if row.state.bias is not None]:
        add_bias(padded, biases)


def penalise(padded: torch.Tensor, rows: list[Row]) -> None:
    """Repetition, frequency and presence penalties; padded[n] belongs to rows[n]."""
    penalties = [(n, row.state.penalties) for n, row in enumerate(rows) if row.state.penalties is not None]
    if penalties:
        for n, one in penalties:
            one.counts.update(rows[n].output)
        apply_penalties(padded, penalties)


def apply_masks(padded: torch.Tensor, rows: list[Row]) -> None:
    """allowed_token_ids, grammar, bad_words, min_tokens; padded[n] belongs to rows[n].

    Where min_tokens would leave nothing of what a grammar allows, the answer may end before its time (as in vLLM).
    """
    for n, row in enumerate(rows):
        if row.state.allowed is not None:
            keep_only(padded[n], row.state.allowed)
        if row.grammar is not None:
            keep_allowed(padded[n], row.grammar)
    held = [
        (n, stops, padded[n, stops])
        for n, row in enumerate(rows)
        if row.grammar is not None and (stops := row.state.held_stops(row.output))
    ]
    if banned := [(n, row.banned) for n, row in enumerate(rows) if row.banned]:
        forbid(padded, banned)
    for n, stops, logits in held:
        if padded[n].amax() == -torch.inf:
            padded[n, stops] = logits
