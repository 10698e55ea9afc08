"""Attention of the engine, registered with transformers: models call it in place of their own.

A model runs over one flat token axis [1, T] that holds the tokens of many requests. Where its attention modules would
attend, transformers calls `_attention` below, and that hands query, key and value to the *active* context: the object
that knows the requests of this step (PagedAttention) or that only looks (models/proof.py).
The context is a module variable and not a keyword argument, because some architectures drop keyword arguments.

Two names are registered. With ATTENTION no mask is made by transformers at all (it knows no mask function for it);
with PROBE every mask is a marker that carries the pattern the architecture wants, see `MaskPattern`.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION", "PROBE", "AttentionContext", "LayerSpec", "MaskPattern", "active", "attend", "mask_pattern_of"]

ATTENTION = "llmkernel"
PROBE = "llmkernel_probe"

_PROBED_LIMIT = 2**17
_BATCHED_MATMUL_ROWS = 8


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One attention layer, as it called us in the probe: heads, sizes per head, and what it asks of the scores.

    window: tokens that a query sees, itself included; None = all before it. has_sinks: a learnt logit per head joins
    the softmax and takes its share away. softcap: scores become softcap * tanh(scores / softcap).
    """

    index: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def row_size(self) -> int:
        """Numbers that one token keeps in the cache: all keys, then all values."""
        return self.num_kv_heads * (self.key_size + self.value_size)


@dataclasses.dataclass(frozen=True)
class MaskPattern:
    """Which positions a query sees, read from a mask function of transformers: causal within a window, or None of it.

    known: False for anything else (bidirectional, chunked, packed ...).
    """

    known: bool
    window: int | None = None


class AttentionContext(Protocol):
    """Who attends in this forward."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """query [1, H, T, D], key [1, KH, T, D], value [1, KH, T, Dv] -> [T, H, Dv]; asked: the keyword arguments."""
        ...


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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerSpec,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(query key^T) value with grouped heads: query [B, H, T, D], key [B, KH, C, D] -> [B, H, T, Dv].

    mask: added to the scores, broadcastable to [B, 1, T, C]. causal: query t sees keys up to t (T == C, no mask).
    """
    rows, _, tokens, _ = query.shape
    if layer.softcap is None and sinks is None and not _batched_matmul_wins(query):
        grouped = layer.num_heads != layer.num_kv_heads
        if grouped and tokens == 1:  # [B, KH, G, D]: each head of the group is one more query of its key
            query = query.reshape(rows, layer.num_kv_heads, -1, layer.key_size)
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scaling)
            return out.reshape(rows, layer.num_heads, 1, layer.value_size)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and tokens > 1, scale=layer.scaling, enable_gqa=grouped
        )
    return _attend_by_matmul(query, key, value, layer, mask, causal=causal, sinks=sinks)


def mask_pattern_of(mask: torch.Tensor | None) -> MaskPattern:
    """The pattern that a PROBE mask carries. No mask: causal (what a model means that makes none)."""
    if mask is None:
        return MaskPattern(known=True)
    return getattr(mask, "llmkernel_pattern", MaskPattern(known=False))


def _batched_matmul_wins(query: torch.Tensor) -> bool:
    """bfloat16 decode of many rows: measured 1.3 (16 rows) to 2 times (64 rows) as fast as torch's fused kernel."""
    return (
        query.dtype == torch.bfloat16
        and query.shape[2] == 1
        and query.shape[0] >= _BATCHED_MATMUL_ROWS
        and query.device.type == "cpu"
    )


def _attend_by_matmul(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerSpec,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, tokens, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    query = query.reshape(rows * kv_heads, group * tokens, size)
    keys = key.reshape(rows * kv_heads, length, size)
    values = value.reshape(rows * kv_heads, length, layer.value_size)
    scores = torch.bmm(query, keys.transpose(1, 2)).view(rows, kv_heads, group, tokens, length).float()
    scores.mul_(layer.scaling)
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if causal and tokens > 1:
        mask = query.new_full((tokens, length), -torch.inf).triu_(1)
    if mask is not None:
        scores.add_(mask if mask.dim() == 2 else mask[:, :, None])
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sink = sinks.float().view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, tokens, 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    weights = weights.reshape(rows * kv_heads, group * tokens, length).to(values.dtype)
    return torch.bmm(weights, values).view(rows, heads, tokens, layer.value_size)


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
