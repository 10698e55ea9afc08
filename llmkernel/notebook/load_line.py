"""How a load is told: one line that changes with its stages, and what was loaded."""

from typing import Any

from llmkernel.config import format_bytes
from llmkernel.notebook.display import is_terminal
from llmkernel.notebook.live_output import LiveOutput
from llmkernel.notebook.model_slot import ModelSlot
from llmkernel.notebook.plain_text import clean_text
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress

__all__ = ["load_line", "model_line", "show_load"]

_BYTES = 1_000_000
"""A total above this counts bytes, not tensors."""


def show_load(shell: Any, slot: ModelSlot, *, reason: str = "") -> None:
    """Show the load of `slot` in this cell until it is over. reason: a word on why it is loaded."""
    if is_terminal(shell):
        print(f"Loading {slot.name}{reason} ...")  # noqa: T201 - the terminal is the display

        def tell() -> None:
            if slot.state != "loading":
                slot.listeners.remove(tell)
                print(load_line(slot, reason))  # noqa: T201
    else:
        output = LiveOutput(shell, lambda: ({"text/plain": load_line(slot, reason)}, {}))
        output.changed()

        def tell() -> None:
            if slot.state == "loading":
                output.changed()
            else:
                slot.listeners.remove(tell)
                output.finish()

    slot.listeners.append(tell)


def load_line(slot: ModelSlot, reason: str = "") -> str:
    """The state of a load."""
    if slot.state == "loading":
        return f"Loading {slot.name}{reason}: {_stage(slot.progress)}"
    if slot.state != "ready" or slot.facts is None:
        return f"Loading {slot.name}{reason}: ended." if slot.state == "unloaded" else f"Loading {slot.name} failed."
    lines = [f"{slot.name} is ready ({slot.load_seconds or 0:.1f} s): {model_line(slot.facts)}"]
    return "\n".join([*lines, *(clean_text(note) for note in slot.facts.model.notes)])


def model_line(facts: EngineCoreReadyResponse) -> str:
    """What was loaded, in a line."""
    model = facts.model
    parts = [model.architecture]
    if model.num_parameters:
        parts.append(f"{model.num_parameters / 1e6:,.0f} M parameters")
    quantization = "" if model.quantization == "none" else f" {model.quantization}"
    parts.append(f"{model.dtype}{quantization} on {model.device}")
    parts.append(f"context {facts.max_model_len:,} tokens")
    parts.append(f"KV cache {format_bytes(facts.kv_cache_bytes)} for {facts.kv_cache_size_tokens:,} tokens")
    return clean_text(", ".join(parts)) + "."


def _stage(progress: Progress | None) -> str:
    if progress is None:
        return "starting the engine process"
    count = ""
    if progress.total > _BYTES:
        count = f" {format_bytes(progress.done)} of {format_bytes(progress.total)}"
    elif progress.total:
        count = f" {progress.done}/{progress.total}"
    detail = f" ({clean_text(progress.detail)})" if progress.detail else ""
    return f"{progress.stage}{count}{detail}"
