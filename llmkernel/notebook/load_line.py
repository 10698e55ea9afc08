"""How a load is told: one line that changes with its stages, and what was loaded."""

from typing import TYPE_CHECKING

from llmkernel.config import format_bytes
from llmkernel.notebook.plain_text import clean_text
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["load_line", "model_line", "stage_line"]

_BYTES = 1_000_000
"""A total above this counts bytes, not tensors."""


def load_line(slot: "ModelSlot", reason: str = "") -> str:
    """The state of a load."""
    if slot.re_attached:
        return _re_attachment_line(slot)
    if slot.state == "loading":
        return f"Loading {slot.name}{reason}: {stage_line(slot.progress)}"
    if slot.state != "ready" or slot.facts is None:
        return f"Loading {slot.name}{reason}: ended." if slot.state == "unloaded" else f"Loading {slot.name} failed."
    return f"{slot.name} is ready ({slot.load_seconds or 0:.1f} s): {clean_text(', '.join(_model(slot.facts)))}."


def _re_attachment_line(slot: "ModelSlot") -> str:
    """The same of an engine that is there, and has only to be found."""
    if slot.state == "loading":
        return f"Re-attaching to {slot.name}, which was kept alive."
    if slot.state != "ready" or slot.facts is None:
        return f"Re-attaching to {slot.name} failed{': ' if slot.failure else '.'}{clean_text(str(slot.failure or ''))}"
    return f"{slot.name} is re-attached ({slot.load_seconds or 0:.1f} s), it was kept alive: {model_line(slot.facts)}"


def model_line(facts: EngineCoreReadyResponse) -> str:
    """What was loaded, in a line, with the memory of the KV cache."""
    cache = f"KV cache {format_bytes(facts.kv_cache_bytes)} for {facts.kv_cache_size_tokens:,} tokens"
    return clean_text(", ".join([*_model(facts), cache])) + "."


def _model(facts: EngineCoreReadyResponse) -> list[str]:
    model = facts.model
    parts = [model.architecture]
    if model.num_parameters:
        parts.append(f"{model.num_parameters / 1e6:,.0f} M parameters")
    quantization = "" if model.quantization == "none" else f" {model.quantization}"
    parts.append(f"{model.dtype}{quantization} on {model.device}")
    most = f" of {model.max_position:,}" if facts.max_model_len < model.max_position else ""
    parts.append(f"context {facts.max_model_len:,}{most} tokens")
    return parts


def stage_line(progress: Progress | None) -> str:
    """A step of a load, in words."""
    if progress is None:
        return "starting the engine process"
    count = ""
    if progress.total > _BYTES:
        count = f" {format_bytes(progress.done)} of {format_bytes(progress.total)}"
    elif progress.total:
        count = f" {progress.done}/{progress.total}"
    detail = f" ({clean_text(progress.detail)})" if progress.detail else ""
    return f"{progress.stage}{count}{detail}"
