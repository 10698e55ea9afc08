"""Completion of our options, verbs and model names on the line of a magic; nothing in the body of a cell."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from llmkernel.config import DEFAULT_MODEL
from llmkernel.notebook.magics import VERBS
from llmkernel.notebook.options import CHAT, GENERATE, LOAD, LOGS, SETTINGS, STATUS, STOP, TURNS, UNLOAD, Option
from llmkernel.notebook.session import Session

__all__ = ["candidates", "matcher"]

_LINE = re.compile(r"(?:^|=\s*)\s*(%%?)(generate|chat|llm)\s+(.*)$")
_OPTIONS: dict[str, tuple[Option, ...]] = {
    "load": LOAD, "unload": UNLOAD, "status": STATUS, "stop": STOP, "logs": LOGS, "chat": TURNS
}  # fmt: skip


def matcher(session: Session) -> Callable[[CompletionContext], Any]:
    """For `Completer.custom_matchers`."""

    @context_matcher(identifier="llmkernel.options")
    def match(context: CompletionContext) -> dict[str, Any]:
        found = _LINE.search(context.text_until_cursor)
        if found is None or (found[1] == "%%" and context.cursor_line > 0):
            return {"completions": [], "suppress": False}
        words = [word for word in candidates(found[2], found[3], session) if word.startswith(context.token)]
        completions = [SimpleCompletion(text=word, type="llmkernel") for word in words]
        return {"completions": completions, "suppress": bool(completions)}

    return match


def candidates(magic: str, typed: str, session: Session) -> Iterable[str]:
    """What may stand at the end of `typed`, the text between the magic's name and the cursor."""
    before = typed.split()
    if typed and not typed[-1].isspace():
        before.pop()
    previous = before[-1] if before else ""
    if previous == "--model" or (magic == "llm" and before and before[0] in ("unload", "logs") and len(before) == 1):
        yield from session.models
    if magic in ("generate", "chat"):
        yield from _flags(GENERATE if magic == "generate" else CHAT)
    elif not before:
        yield from VERBS
    elif before[0] == "load" and len(before) == 1:
        yield DEFAULT_MODEL
    elif before[0] == "chat" and len(before) == 1:
        yield from ("show", "undo", "reset")
    elif before[0] == "config":
        yield from (f"{name}=" for name in SETTINGS)
    elif before[0] in ("stop", "show"):
        yield from (generation.id for generation in session.generations)
    yield from _flags(_OPTIONS.get(before[0], ())) if magic == "llm" and before else ()


def _flags(options: Iterable[Option]) -> list[str]:
    return [flag for option in options for flag in option.flags if flag.startswith("--")]
