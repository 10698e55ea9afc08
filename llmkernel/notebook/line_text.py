"""What IPython would do to the line of a magic that holds a prompt, and we do not let it: `?` at its end, and braces in
a regular expression."""

import re
from collections.abc import Mapping
from typing import Any

from IPython.core.inputtransformer2 import TokenTransformBase
from IPython.utils.text import DollarFormatter

__all__ = ["QuestionLine", "expand_line"]

_ASKED = re.compile(r"(\s*)((?:[^\W\d]\w*\s*=\s*)?)%(generate|chat)[ \t]+(.*[^?\s].*\?)\s*")
_EXACT = re.compile(
    r"""--(?:regex|grammar|json-schema)(?:=|\s+)(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S+)""",
)


class QuestionLine(TokenTransformBase):
    """`%chat Who are you?` is a question, not IPython's request for help on `you`."""

    priority = 4  # before HelpEnd

    def __init__(self, start: tuple[int, int], call: str) -> None:
        super().__init__(start)
        self._call = call

    @classmethod
    def find(cls, tokens_by_line: list[list[Any]]) -> "QuestionLine | None":
        for tokens in tokens_by_line:
            if len(tokens) > 2 and tokens[-2].string == "?" and (found := _ASKED.fullmatch(tokens[0].line)):
                indent, target, name, rest = found.groups()
                return cls(tokens[0].start, f"{indent}{target}get_ipython().run_line_magic({name!r}, {rest!r})\n")
        return None

    def transform(self, lines: list[str]) -> list[str]:
        return [*lines[: self.start_line], self._call, *lines[self.start_line + 1 :]]


def expand_line(line: str, namespace: Mapping[str, Any]) -> str:
    """`line` with IPython's `{expression}` and `$name` filled in, but for the values of --regex, --grammar and
    --json-schema, in which braces have a meaning of their own."""
    pieces, position = [], 0
    for exact in _EXACT.finditer(line):
        pieces += [_filled(line[position : exact.start()], namespace), exact[0]]
        position = exact.end()
    return "".join([*pieces, _filled(line[position:], namespace)])


def _filled(text: str, namespace: Mapping[str, Any]) -> str:
    try:
        return str(DollarFormatter().vformat(text, [], namespace))
    except Exception:  # noqa: BLE001 - as IPython does: what cannot be filled in stays as it is
        return text
