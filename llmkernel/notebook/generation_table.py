"""What `%llm ps` prints: a line per generation."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.row_feed import RowFeed

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["generation_table"]

_PROMPT_LENGTH = 48


def generation_table(generations: "Iterable[Generation]") -> str:
    """One line per generation: id, cell, model, state with what it waits for, tokens, the prompt's beginning."""
    rows = [_line(generation) for generation in generations]
    if not rows:
        return "Nothing was asked yet."
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _line(generation: "Generation") -> tuple[str, ...]:
    words = " ".join(clean_text(generation.rows[0].prompt.text).split())
    short = words if len(words) <= _PROMPT_LENGTH else words[: _PROMPT_LENGTH - 1] + "…"
    more = f" (+{len(generation.rows) - 1})" if len(generation.rows) > 1 else ""
    return (
        generation.id,
        f"[{generation.cell}]" if generation.cell else "",
        generation.model,
        _state(generation),
        f"{generation.metrics.generation_tokens} tokens",
        short + more,
    )


def _state(generation: "Generation") -> str:
    """ "running", "queued #2: waiting for KV: needs 12 blocks, 9 free", "prefill 512 / 1,800 tokens" ..."""
    if generation.done:
        return generation.state
    waits = [wait for feed in RowFeed.of(generation) if (wait := feed.look()) is not None]
    if not waits:
        return generation.state
    first = min(waits, key=lambda wait: wait.position)
    return f"{first} (+{len(waits) - 1})" if len(waits) > 1 else str(first)
