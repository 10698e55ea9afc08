"""The greedy pick: the first index of each row's maximum, and whether the row is sound."""

import torch

from llmkernel.engine.worker.sampler.chunks import CHUNK, chunk_maxima

__all__ = ["pick_greedy"]

_INFINITY_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def pick_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of the maximum of each row [rows, vocab], and that maximum as float32.

    A row that holds NaN has the maximum NaN; +inf and -inf are told by the maximum too.
    """
    if logits.dtype in _INFINITY_BITS:
        return _pick_16_bit(logits)
    return _pick_float(logits)


def _pick_16_bit(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """16-bit floats compare like their bits as int16 as long as the maximum is not negative; integers reduce fast.

    Rows with a negative maximum go the float way. NaN with a set sign hides among the negative bits: a sum finds it.
    """
    bits = logits.view(torch.int16)
    tokens, maxima_bits = _two_stage(bits)
    maxima = maxima_bits.view(logits.dtype).float()
    maxima = torch.where(logits.sum(-1).isnan(), torch.nan, maxima)
    slow = (maxima_bits <= 0).nonzero().flatten()
    if slow.numel():
        tokens[slow], maxima[slow] = _pick_float(logits[slow].float())
        maxima = torch.where(logits.sum(-1).isnan(), torch.nan, maxima)
    return tokens, maxima


def _pick_float(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, maxima = _two_stage(logits)
    return tokens, maxima.float()


def _two_stage(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index of the maximum, and the maximum: chunk maxima, the first best chunk, the first best inside it."""
    maxima, chunks = chunk_maxima(rows).max(-1)
    columns = chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=rows.device)
    inside = rows.gather(-1, columns.clamp_(max=rows.shape[-1] - 1))
    return chunks * CHUNK + (inside == maxima.unsqueeze(-1)).int().argmax(-1), maxima
