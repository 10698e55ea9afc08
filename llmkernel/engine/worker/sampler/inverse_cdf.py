"""Draws by inverse CDF: a uniform u takes the first token whose cumulative weight, in order of ids, exceeds u * total.

The order is that of the ids, never that of the values: a small change of the logits moves the edges a little, and
cannot make two intervals change places. Sums are float64.
"""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, chunk_masses, exp_weights, gather_chunks

__all__ = ["draw_from_all", "draw_from_some"]


def draw_from_all(
    rows: torch.Tensor, row_max: torch.Tensor, inverse_temperatures: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Token ids [rows] of padded rows. row_max (finite), inverse_temperatures: [rows, 1]; uniforms: float64 [rows]."""
    masses = chunk_masses(rows, row_max, inverse_temperatures)
    edges = masses.cumsum(-1)
    target = uniforms.unsqueeze(-1) * edges[:, -1:]
    chunk = _first_beyond(edges, target, masses)
    before = torch.where(chunk > 0, edges.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    logits = gather_chunks(rows, chunk).squeeze(1)
    weights = exp_weights(logits, row_max, inverse_temperatures).to(torch.float64)
    inside = _first_beyond(weights.cumsum(-1), target - before, weights)
    return (chunk * CHUNK + inside).squeeze(-1)


def draw_from_some(weights: torch.Tensor, ids: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [rows] of float64 weights [rows, n] of the tokens `ids` [rows, n], ascending; the rest weighs 0."""
    edges = weights.cumsum(-1)
    chosen = _first_beyond(edges, uniforms.unsqueeze(-1) * edges[:, -1:], weights)
    return ids.gather(1, chosen).squeeze(-1)


def _first_beyond(edges: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: first index whose edge exceeds the target; the last one of any weight where rounding leaves none."""
    found = (edges <= target).sum(-1, keepdim=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(found, last)
