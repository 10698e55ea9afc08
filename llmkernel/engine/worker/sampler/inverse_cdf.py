"""Draws by inverse CDF: the token of a uniform u is the first whose cumulative weight, in order of ids, exceeds u * total.

The order is that of the ids, never that of the values, so that a small change of the logits moves the edges a little
and cannot swap two intervals. Sums are float64.
"""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK

__all__ = ["draw", "draw_sparse"]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [rows] of float32 weights [rows, padded vocab], none of them all zero; uniforms: float64 [rows]."""
    chunks = weights.unflatten(-1, (-1, CHUNK))
    edges = chunks.sum(-1).to(torch.float64).cumsum(-1)
    target = uniforms * edges[:, -1]
    chosen = _first_beyond(edges, target, edges.diff(dim=-1, prepend=torch.zeros_like(edges[:, :1])) > 0)
    before = torch.where(chosen > 0, edges.gather(1, (chosen - 1).clamp_(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
    inside = chunks.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, CHUNK)).squeeze(1).to(torch.float64)
    return chosen * CHUNK + _first_beyond(inside.cumsum(-1), target - before, inside > 0)


def draw_sparse(weights: torch.Tensor, ids: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [rows] of float64 weights [rows, n] of the tokens `ids` [rows, n], in any order; the rest weighs 0."""
    ids, order = ids.sort(-1)
    weights = weights.gather(1, order)
    edges = weights.cumsum(-1)
    chosen = _first_beyond(edges, uniforms * edges[:, -1], weights > 0)
    return ids.gather(1, chosen.unsqueeze(-1)).squeeze(-1)


def _first_beyond(edges: torch.Tensor, target: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """First index whose edge exceeds the target; the last positive one where rounding put the target at the end."""
    found = (edges <= target.unsqueeze(-1)).sum(-1)
    last = edges.shape[1] - 1 - positive.flip(-1).int().argmax(-1)
    return torch.minimum(found, last)
