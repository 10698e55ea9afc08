"""Temperature, min_p, top_k, top_p and the draw, for rows that are not greedy.

min_p keeps tokens with p >= min_p * p_max. top_k keeps every token whose logit is at least the k-th best (more than k when
they are equal, as vLLM does). top_p keeps the smallest set of the best tokens, of what is left, whose mass reaches top_p;
the token that crosses is kept, and of equal logits the lower id comes first. What is kept is renormalised.

Most rows are settled by their best 64 (or 256) entries; a row that needs more takes the dense way, which means the same.
"""

import dataclasses

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, exp_weights
from llmkernel.engine.worker.sampler.inverse_cdf import draw, draw_sparse
from llmkernel.engine.worker.sampler.top_entries import top_entries

__all__ = ["WIDTHS", "Truncation", "draw_tokens", "kept_weights"]

WIDTHS = (64, 256)
"""How many of the best entries are looked at: the first that exceeds top_k."""


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """How one row is cut. top_k 0, top_p 1, min_p 0 mean off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_off(self) -> bool:
        return not self.top_k and self.top_p >= 1 and not self.min_p

    @property
    def width(self) -> int:
        """Entries to look at; 0: straight to the dense way (or no truncation at all)."""
        return 0 if self.is_off else next((width for width in WIDTHS if width > self.top_k), 0)


def draw_tokens(
    rows: torch.Tensor,
    maxima: torch.Tensor,
    cuts: list[Truncation],
    uniforms: torch.Tensor,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids [rows] of padded rows. maxima: their chunk_maxima; a row's must be finite. scratch: like rows, overwritten."""
    tokens = torch.full((len(cuts),), -1, dtype=torch.int64, device=rows.device)
    for width in WIDTHS:
        which = [i for i, cut in enumerate(cuts) if cut.width == width]
        if which:
            index, group = _subset(rows, maxima, which)
            tokens[index] = _draw_narrow(*group, [cuts[i] for i in which], uniforms[index], width)
    open_rows = [i for i, cut in enumerate(cuts) if cut.is_off]
    if open_rows:
        index, (group_rows, group_maxima) = _subset(rows, maxima, open_rows)
        tokens[index] = _draw_open(group_rows, group_maxima, [cuts[i] for i in open_rows], uniforms[index], scratch)
    for i in (tokens < 0).nonzero().flatten().tolist():
        weights = kept_weights(rows[i : i + 1], maxima[i : i + 1], cuts[i])
        tokens[i] = draw(weights, uniforms[i : i + 1])[0]
    return tokens


def kept_weights(row: torch.Tensor, maxima: torch.Tensor, cut: Truncation) -> torch.Tensor:
    """The dense way, for one padded row [1, n]: unnormalised probabilities after temperature and truncation, 0 = cut off."""
    row_max = maxima.amax(-1, keepdim=True)
    weights = exp_weights(row, row_max, torch.full_like(row_max, cut.temperature))
    if cut.min_p:
        weights[weights < cut.min_p] = 0
    if cut.top_k:
        weights[row < row.topk(cut.top_k).values[:, -1:]] = 0
    if cut.top_p < 1:
        _cut_top_p(row[0], weights[0], cut.top_p)
    return weights


def _cut_top_p(row: torch.Tensor, weights: torch.Tensor, top_p: float) -> None:
    """Zero what top_p leaves out. Only tokens that could matter are sorted: those below `least` weigh (1 - p) together."""
    total = weights.sum(dtype=torch.float64)
    least = (1 - top_p) / len(weights) * float(total)
    candidates = (weights >= min(least, 1.0)).nonzero().squeeze(-1)
    order = row[candidates].sort(descending=True, stable=True).indices
    candidates = candidates[order]
    kept = weights[candidates]
    before = torch.nn.functional.pad(kept.to(torch.float64).cumsum(-1)[:-1], (1, 0))
    kept[before >= top_p * total] = 0
    weights.zero_()
    weights[candidates] = kept


def _draw_open(
    rows: torch.Tensor,
    maxima: torch.Tensor,
    cuts: list[Truncation],
    uniforms: torch.Tensor,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    out = None if scratch is None else scratch[: len(cuts)]
    return draw(exp_weights(rows, maxima.amax(-1, keepdim=True), _column(cuts, "temperature", rows), out), uniforms)


def _draw_narrow(
    rows: torch.Tensor, maxima: torch.Tensor, cuts: list[Truncation], uniforms: torch.Tensor, width: int
) -> torch.Tensor:
    """Tokens of rows settled by their `width` best entries; -1 for the others."""
    width = min(width, rows.shape[1])
    values, ids = top_entries(rows, maxima, width)
    temperatures, min_p = _column(cuts, "temperature", rows), _column(cuts, "min_p", rows)
    weights = exp_weights(values, values[:, :1], temperatures)
    top_k = torch.tensor([cut.top_k for cut in cuts], device=rows.device).unsqueeze(-1)
    kth = values.gather(1, (top_k - 1).clamp_(0, width - 1))
    kth = torch.where(top_k > 0, kth, -torch.inf)
    settled = (values[:, -1:] < kth) | (weights[:, -1:] < min_p) | (values[:, -1:] == -torch.inf)
    settled = (settled | (width == rows.shape[1])).squeeze(-1)
    kept = torch.where((values < kth) | (weights < min_p), 0.0, weights).to(torch.float64)
    total = kept.sum(-1)
    top_p = torch.tensor([cut.top_p for cut in cuts], dtype=torch.float64, device=rows.device)
    unbounded = [i for i, cut in enumerate(cuts) if not cut.top_k and not cut.min_p]
    if unbounded:
        total[unbounded] = _masses(rows, maxima, cuts, unbounded)
    target = top_p * total
    edges = kept.cumsum(-1)
    if unbounded:
        settled[unbounded] = (edges[:, -1] >= target)[unbounded]
    before = torch.nn.functional.pad(edges[:, :-1], (1, 0))
    kept[(before >= target.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)] = 0
    return torch.where(settled, draw_sparse(kept, ids, uniforms), -1)


def _masses(rows: torch.Tensor, maxima: torch.Tensor, cuts: list[Truncation], which: list[int]) -> torch.Tensor:
    """float64 [len(which)]: the sum of the weights over the whole vocabulary."""
    _, (group, group_maxima) = _subset(rows, maxima, which)
    temperatures = _column([cuts[i] for i in which], "temperature", rows)
    weights = exp_weights(group, group_maxima.amax(-1, keepdim=True), temperatures)
    return weights.unflatten(-1, (-1, CHUNK)).sum(-1).sum(-1, dtype=torch.float64)


def _subset(
    rows: torch.Tensor, maxima: torch.Tensor, which: list[int]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The index of `which`, and those rows with their maxima; nothing is copied when it is all of them."""
    index = torch.tensor(which, device=rows.device)
    return index, ((rows, maxima) if len(which) == len(rows) else (rows[index], maxima[index]))


def _column(cuts: list[Truncation], name: str, rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[getattr(cut, name)] for cut in cuts], dtype=torch.float32, device=rows.device)
