"""Reads the line of a magic: options first, then the rest exactly as it was typed.

A word may stand in quotes, which are taken off; inside quotes \\n, \\t and \\\\ are newline, tab and backslash. `--`
ends the options. Mistakes raise UsageError: one line, no traceback.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

from llmkernel.notebook.options import GENERATE, Option

__all__ = ["AWAITED_VERBS", "help_text", "is_awaited_verb", "is_background", "parse_line", "split_words", "unquote"]

AWAITED_VERBS = ("load", "ps", "restart", "trace", "unload")
"""Verbs of %llm that take time; the others answer at once."""

_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_WORD = re.compile(rf"""\s*((?:{_QUOTED}|\S)(?:"(?:\\.|[^"\\])*"|=(?:{_QUOTED})|\S)*)""")
_ESCAPE = re.compile(r"\\([nt\\\"'])")
_ESCAPES = {"n": "\n", "t": "\t"}


def parse_line(line: str, options: Sequence[Option], *, command: str) -> tuple[dict[str, Any], str]:
    """(values of the options that stand in `line`, the rest of the line). command: for messages, "%%generate"."""
    by_flag = {flag: option for option in options for flag in option.flags}
    values: dict[str, Any] = {}
    position = 0
    while (found := _WORD.match(line, position)) and found[1].startswith("-") and found[1] != "-":
        word, after = found[1], found.end()
        if word == "--":
            return values, line[after:].removeprefix(" ")
        flag, equals, text = word.partition("=")
        option = by_flag.get(flag)
        if option is None:
            raise UsageError(_unknown(flag, by_flag, command))
        if not option.metavar:
            if equals:
                raise UsageError(f"{flag} takes no value.")
            values[option.name] = True
        else:
            if not equals:
                value = _WORD.match(line, after)
                if value is None:
                    raise UsageError(f"{flag} needs a value: {option.usage}.")
                text, after = value[1], value.end()
            parsed = option.value(unquote(text))
            values[option.name] = [*values.get(option.name, []), parsed] if option.repeat else parsed
        position = after
    return values, line[position:].lstrip()


def unquote(word: str) -> str:
    """A word without the quotes around it."""
    if word[:1] in ("'", '"'):
        if len(word) < 2 or word[0] != word[-1]:
            raise UsageError(f"{word}: the closing quote is missing.")
        return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), word[1:-1])
    return word


def split_words(line: str) -> list[str]:
    """The words of a line, quotes taken off."""
    return [unquote(found[1]) for found in _WORD.finditer(line)]


def is_background(line: str) -> bool:
    """Whether the line of %generate says --background."""
    try:
        values, _ = parse_line(line, GENERATE, command="%generate")
    except UsageError:
        return False  # the magic itself says what is wrong
    return values.get("background", False)


def is_awaited_verb(line: str) -> bool:
    """Whether this line of %llm takes time."""
    return bool(words := line.split(maxsplit=1)) and words[0] in AWAITED_VERBS


def help_text(options: Sequence[Option]) -> str:
    """A table of the options for people."""
    width = max(len(option.usage) for option in options)
    return "\n".join(f"  {option.usage:{width}}  {option.help}" for option in options)


def _unknown(flag: str, by_flag: dict[str, Option], command: str) -> str:
    near = difflib.get_close_matches(flag, by_flag, n=1)
    help_command = "%llm help" if command.startswith("%llm") else f"{command}?"
    hint = f"did you mean {near[0]}?" if near else f"{help_command} lists the options."
    dash = " (A prompt that begins with a dash goes after --.)" if command == "%generate" else ""
    return f"Unknown option {flag}; {hint}{dash}"
