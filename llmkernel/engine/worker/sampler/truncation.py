"""Temperature, min_p, top_k, top_p and the draw, for rows that are not greedy.

min_p keeps the tokens with p >= min_p * p_max. top_k keeps every token whose logit is at least the k-th best: more than
k where they are equal, as in vLLM. top_p keeps the smallest set of the best tokens, of those left, whose mass reaches
top_p: the token that crosses is kept, and of equal logits the lower id goes first. What is kept is renormalised.

Most rows are settled by their 64 (or 256) best entries. The others take the dense way, one by one, to the same end.
"""

import dataclasses

import torch

from llmkernel.engine.worker.sampler.chunks import chunk_masses, exp_weights
from llmkernel.engine.worker.sampler.inverse_cdf import draw_from_all, draw_from_some
from llmkernel.engine.worker.sampler.top_entries import pack_keys, sort_keys, top_entries, unpack_keys

__all__ = ["Truncation", "draw_tokens", "processed_logits"]

_WIDTHS = (64, 256)
"""How many of the best entries are looked at: the first number that exceeds top_k."""


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """What a row is multiplied with, 1 / temperature, and how it is cut. top_k 0, top_p 1, min_p 0 mean off."""

    inverse_temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_off(self) -> bool:
        return not self.top_k and self.top_p >= 1 and not self.min_p

    @property
    def needs_mass(self) -> bool:
        """Whether the mass of the whole vocabulary must be known: top_p alone."""
        return not self.top_k and not self.min_p

    @property
    def width(self) -> int:
        """Entries to look at; 0 = all."""
        return 0 if self.is_off else next((width for width in _WIDTHS if width > self.top_k), 0)


def draw_tokens(
    rows: torch.Tensor, maxima: torch.Tensor, cuts: list[Truncation], uniforms: torch.Tensor
) -> torch.Tensor:
    """Token ids [rows] of padded rows. maxima: their chunk_maxima, finite in every row; uniforms: float64 [rows]."""
    tokens = torch.full((len(cuts),), -1, dtype=torch.int64, device=rows.device)
    groups: dict[int, list[int]] = {}
    for i, cut in enumerate(cuts):
        groups.setdefault(-1 if cut.is_off else cut.width, []).append(i)
    dense = groups.pop(0, [])
    for width, which in groups.items():
        index, group, group_maxima = _subset(rows, maxima, which)
        group_cuts = [cuts[i] for i in which]
        if width < 0:
            inverse = _column(group_cuts, "inverse_temperature", rows)
            drawn = draw_from_all(group, group_maxima.amax(-1, keepdim=True), inverse, uniforms[index])
        else:
            drawn = _draw_narrow(group, group_maxima, group_cuts, uniforms[index], width)
            dense += [which[n] for n in (drawn < 0).nonzero().squeeze(-1).tolist()]
        tokens[index] = drawn
    for i in dense:
        ids, weights = _kept_tokens(rows[i], maxima[i], cuts[i])
        tokens[i] = draw_from_some(weights.unsqueeze(0), ids.unsqueeze(0), uniforms[i : i + 1])[0]
    return tokens


def processed_logits(row: torch.Tensor, maxima: torch.Tensor, cut: Truncation) -> torch.Tensor:
    """One padded row [n] as it is drawn from: divided by the temperature, -inf for what is cut off."""
    ids, weights = _kept_tokens(row, maxima, cut)
    ids = ids[weights > 0]
    processed = torch.full_like(row, -torch.inf)
    processed[ids] = row[ids] * cut.inverse_temperature
    return processed


def _draw_narrow(
    rows: torch.Tensor, maxima: torch.Tensor, cuts: list[Truncation], uniforms: torch.Tensor, width: int
) -> torch.Tensor:
    """Tokens of the rows that their `width` best entries settle, -1 for the others."""
    width = min(width, rows.shape[1])
    values, ids = top_entries(rows, maxima, width)
    inverse, min_p = _column(cuts, "inverse_temperature", rows), _column(cuts, "min_p", rows)
    top_k, top_p = _column(cuts, "top_k", rows).long(), _column(cuts, "top_p", rows, torch.float64)
    weights = exp_weights(values, values[:, :1], inverse)
    kth = torch.where(top_k > 0, values.gather(1, (top_k - 1).clamp_(min=0)), -torch.inf)
    out = (values < kth) | (weights < min_p) | (values == -torch.inf)
    kept = torch.where(out, 0.0, weights).to(torch.float64)
    settled = out[:, -1].clone() if width < rows.shape[1] else torch.ones_like(out[:, -1])
    edges = kept.cumsum(-1)
    target = top_p * edges[:, -1:]
    alone = [i for i, cut in enumerate(cuts) if cut.needs_mass]
    if alone:
        index, group, group_maxima = _subset(rows, maxima, alone)
        masses = chunk_masses(group, group_maxima.amax(-1, keepdim=True), inverse[index])
        target[index] = top_p[index] * masses.sum(-1, keepdim=True)
        settled[index] |= (edges[:, -1:] >= target)[index, 0]
    before = torch.nn.functional.pad(edges[:, :-1], (1, 0))
    kept = torch.where((before >= target) & (top_p < 1), 0.0, kept)
    ids, order = ids.sort(-1)
    return torch.where(settled, draw_from_some(kept.gather(1, order), ids, uniforms), -1)


def _kept_tokens(row: torch.Tensor, maxima: torch.Tensor, cut: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense way, for one padded row [n]: the tokens that may be drawn, ascending, and their float64 weights."""
    weights = exp_weights(row, maxima.amax(), torch.tensor(cut.inverse_temperature, device=row.device))
    if cut.min_p:
        weights = torch.where(weights >= cut.min_p, weights, 0.0)
    if cut.top_k:
        weights = torch.where(row >= row.topk(cut.top_k).values[-1], weights, 0.0)
    total = weights.sum(dtype=torch.float64)
    # What weighs less than this makes up less than 1 - top_p altogether: it need not be sorted.
    least = (1 - cut.top_p) / len(row) * total
    ids = ((weights >= least) & (weights > 0)).nonzero().squeeze(-1)
    weights = weights[ids].to(torch.float64)
    if cut.top_p < 1:
        weights = _cut_top_p(row[ids], weights, cut.top_p * total)
    return ids, weights


def _cut_top_p(logits: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The weights [n] of tokens in order of ids, 0 for those after the one that brings the mass to the target."""
    keys = pack_keys(logits, torch.arange(len(logits), device=logits.device))
    best_first = sort_keys(keys.clone()).flip(-1)
    edges = weights[unpack_keys(best_first)[1]].cumsum(-1)
    crossing = (edges < target).sum().clamp_(max=len(keys) - 1)
    return torch.where(keys < best_first[crossing], 0.0, weights)


def _subset(
    rows: torch.Tensor, maxima: torch.Tensor, which: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The index of `which`, those rows, and their maxima; nothing is copied when it is all of them."""
    index = torch.tensor(which, device=rows.device)
    return (index, rows, maxima) if len(which) == len(rows) else (index, rows[index], maxima[index])


def _column(cuts: list[Truncation], name: str, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[getattr(cut, name)] for cut in cuts], dtype=dtype, device=rows.device)
