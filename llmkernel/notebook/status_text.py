"""What `%llm status` and `%llm ps` print."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkernel.config import format_bytes
from llmkernel.notebook.load_line import load_line, model_line
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.session import Session

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["generation_table", "status_text"]

_PROMPT_LENGTH = 48


def status_text(session: Session) -> str:
    """Every model: what it is, what it does now, the memory it takes."""
    if not session.models:
        return "No model is loaded; %llm load MODEL loads one."
    return "\n".join(_model(slot, slot.name == session.default) for slot in session.models.values())


def generation_table(generations: "Iterable[Generation]") -> str:
    """One line per generation: id, model, state, tokens, the prompt's beginning."""
    rows = [_row(generation) for generation in generations]
    if not rows:
        return "Nothing was asked yet."
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )


def _model(slot: "ModelSlot", is_default: bool) -> str:
    if slot.state == "loading":
        return load_line(slot)
    head = f"{slot.name}{' (default)' if is_default else ''}: {slot.state}"
    if slot.state != "ready" or slot.facts is None:
        again = f"(%llm restart {slot.name} starts it again)"
        return f"{head} {again}: {slot.llm.dead_error}" if slot.state == "dead" else head
    lines = [f"{head}, {model_line(slot.facts)}"]
    process = slot.process
    if process is not None:
        lines.append(f"  engine process {process.pid}, {format_bytes(process.memory())}")
    if slot.llm.health.state != "ok":
        lines.append(f"  {slot.llm.health}")
    stats = slot.llm.get_scheduler_stats()
    if stats is not None:
        usage = f"KV cache {stats.kv_cache_usage:.0%} used"
        lines.append(f"  {stats.num_running_reqs} running, {stats.num_waiting_reqs} waiting, {usage}")
        if stats.waiting_head is not None:
            lines.append(f"  {stats.waiting_head.request_id} waits: {stats.waiting_head.reason}")
    return "\n".join(lines)


def _row(generation: "Generation") -> tuple[str, str, str, str, str]:
    words = " ".join(clean_text(generation.rows[0].prompt.text).split())
    short = words if len(words) <= _PROMPT_LENGTH else words[: _PROMPT_LENGTH - 1] + "…"
    more = f" (+{len(generation.rows) - 1})" if len(generation.rows) > 1 else ""
    tokens = f"{generation.metrics.generation_tokens} tokens"
    return generation.id, generation.model, generation.state, tokens, short + more
