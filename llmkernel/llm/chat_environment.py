"""The jinja2 environment of chat templates: transformers' dialect, sandboxed, with a deadline."""

import contextvars
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmkernel.errors import InvalidRequestError

__all__ = ["ChatEnvironment", "deadline"]

_MAX_REPEAT = 1_000_000
"""Characters or items that `*` may make, and bits that `**` may make."""

deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline")
"""time.monotonic() at which the rendering that runs now must be through."""


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant said; renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What transformers renders chat templates with, and stricter.

    trim_blocks and lstrip_blocks, `tojson` without HTML escapes, `strftime_now`, `raise_exception`, break and
    continue, the generation tag. Templates come with models, so they are not trusted: jinja2's immutable sandbox, and
    as that alone stops no loop over a list, every turn of a loop and every macro looks at the clock; `*` and `**` are
    limited.
    """

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def check_deadline(self) -> str:
        if time.monotonic() > deadline.get():
            raise InvalidRequestError(
                "The chat template did not come to an end in time; give another template.", parameter="chat_template"
            )
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**`: a template must not fill the memory with one operation."""
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(times, int):
                self._limit(len(value) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._limit(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _limit(size: int) -> None:
        if size > _MAX_REPEAT:
            raise InvalidRequestError(
                "The chat template asks for too much memory; give another template.", parameter="chat_template"
            )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            look = nodes.Call(nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look))  # type: ignore[attr-defined]  # the three have a body
        return tree
