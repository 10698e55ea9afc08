"""Attention of the engine, registered with transformers: its models call it in place of their own.

A model runs over one flat token axis [1, T] that holds the tokens of many requests. Where its attention modules would
attend, transformers calls `_attention` below, and that hands query, key and value to the *active* context: the object
that knows the requests of this step (PagedAttention) or that only looks (models/probe.py).
The context is a module variable and not a keyword argument, because some architectures drop keyword arguments.

Two names are registered. With ATTENTION no mask is made by transformers at all (it knows no mask function for it);
with PROBE every mask is a marker that carries the pattern the architecture wants, see `MaskPattern`.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from llmkernel.engine.worker.attention import AttentionContext

__all__ = ["ATTENTION", "PROBE", "MaskPattern", "active", "mask_pattern_of"]

ATTENTION = "llmkernel"
PROBE = "llmkernel_probe"

_PROBED_LIMIT = 2**17


@dataclasses.dataclass(frozen=True)
class MaskPattern:
    """Which positions a query sees, read from a mask function of transformers: causal within a window, or None of it.

    known: False for anything else (bidirectional, chunked, packed ...).
    """

    known: bool
    window: int | None = None


_context: AttentionContext | None = None


@contextmanager
def active(context: AttentionContext) -> Iterator[None]:
    """Within: forwards of models loaded with ATTENTION or PROBE attend through `context`. Engine thread only."""
    global _context
    before, _context = _context, context
    try:
        yield
    finally:
        _context = before


def mask_pattern_of(mask: torch.Tensor | None) -> MaskPattern:
    """The pattern that a PROBE mask carries. No mask: causal (what a model means that makes none)."""
    if mask is None:
        return MaskPattern(known=True)
    return getattr(mask, "llmkernel_pattern", MaskPattern(known=False))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls. Returns [1, T, H, Dv], and no attention weights."""
    if _context is None:
        raise RuntimeError("A model that attends through llmkernel ran outside of a step.")
    if attention_mask is not None:
        asked["attention_mask"] = attention_mask
    return _context.attend(module, query, key, value, asked)[None], None


def _probe_mask(*, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **_: Any) -> torch.Tensor:
    """A mask of the right shape that carries its pattern, for PROBE. Its values are never read."""
    mask = torch.zeros(1, 1, q_length, kv_length, device=device)
    mask.llmkernel_pattern = _pattern(mask_function)
    return mask


def _pattern(mask_function: Any) -> MaskPattern:
    """Ask a mask function what two late queries see. Mask functions take (batch, head, query, key) indices."""
    windows = set()
    keys = torch.arange(_PROBED_LIMIT)
    zero = torch.tensor(0)
    for position in (_PROBED_LIMIT - 1003, _PROBED_LIMIT - 7):
        try:
            seen = mask_function(zero, zero, torch.tensor(position), keys)
        except (IndexError, RuntimeError):  # tied to the tokens of this batch (packed, padded): not a plain pattern
            return MaskPattern(known=False)
        visible = torch.as_tensor(seen).expand(_PROBED_LIMIT).nonzero().flatten()
        first, last = (int(visible[0]), int(visible[-1])) if len(visible) else (1, 0)
        if last != position or len(visible) != last - first + 1:
            return MaskPattern(known=False)
        windows.add(None if first == 0 else len(visible))
    return MaskPattern(known=len(windows) == 1, window=windows.pop())


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
