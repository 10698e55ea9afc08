"""The greedy pick: the first index of each row's maximum, and that maximum, which tells whether the row is sound."""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, chunk_maxima

__all__ = ["pick_best", "pick_greedy"]


def pick_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index of the maximum of each row [rows, vocab] of any float type, and the maximum as float32.

    A row that holds NaN has the maximum NaN, whatever its index.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        return _pick_16_bit(logits)
    maxima = chunk_maxima(logits)
    return pick_best(logits, maxima), maxima.amax(-1).float()


def pick_best(rows: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """First index of the maximum: the first best chunk by `maxima` (chunk_maxima), then the first best inside it."""
    best, chunks = maxima.max(-1, keepdim=True)
    columns = chunks * CHUNK + torch.arange(CHUNK, device=rows.device)
    inside = rows.gather(1, columns.clamp_(max=rows.shape[1] - 1))
    return chunks.squeeze(-1) * CHUNK + (inside == best).int().argmax(-1)


def _pick_16_bit(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positive 16-bit floats compare as their bits do, and integers reduce many times faster.

    A row whose maximum is not positive goes the float way. NaN with a set sign hides among the negative bits: a sum
    finds it.
    """
    bits = logits.view(torch.int16)
    maxima = chunk_maxima(bits)
    tokens, best_bits = pick_best(bits, maxima), maxima.amax(-1)
    best = best_bits.view(logits.dtype).float()
    slow = (best_bits <= 0).nonzero().squeeze(-1)
    if len(slow):
        tokens[slow], best[slow] = pick_greedy(logits[slow].float())
    return tokens, torch.where(logits.sum(-1).isnan(), torch.nan, best)
