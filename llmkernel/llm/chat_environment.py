"""The jinja2 environment of chat templates: transformers' dialect, sandboxed, with a deadline."""

import contextvars
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.chat_limits import check_operation, check_sizes, guarded, joined

__all__ = ["ChatEnvironment", "deadline"]

_MAX_INDENT = 64

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
    indent = min(indent, _MAX_INDENT) if isinstance(indent, int) else indent
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` as templates know it: it makes dicts, and has no attributes that lead elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name of its own, so that a namespace may have a `self`
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore in front, such as {name!r}")


class _Joins(NodeTransformer):
    """`a ~ b` becomes a call, which can look at the sizes."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_texts"), node.nodes, [], None, None, lineno=node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What transformers renders chat templates with, and stricter.

    trim_blocks and lstrip_blocks, `tojson` without HTML escapes, `strftime_now`, `raise_exception`, break and
    continue, the generation tag. Templates come with models, so they are not trusted: jinja2's immutable sandbox, and
    as that alone stops no loop over a list and bounds no text, every turn of a loop and every macro looks at the
    clock, and what makes texts or lists at their sizes.
    """

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters = {name: guarded(function) for name, function in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]

    def check_deadline(self) -> str:
        if time.monotonic() > deadline.get():
            raise InvalidRequestError(
                "The chat template did not come to an end in time; give another template.", parameter="chat_template"
            )
        return ""

    def join_texts(self, *values: Any) -> str:
        return joined(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a function or method: `"x".center(n)` makes texts as filters do."""
        check_sizes(getattr(__obj, "__self__", None), *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format`, where the text holds no enormous width."""
        if (wrapped := super().wrap_str_format(value)) is not None:
            check_operation("%", value.__self__.replace("*", ""), None)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Joins().visit(super()._parse(source, name, filename))
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            look = nodes.Call(nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look))  # type: ignore[attr-defined]  # the three have a body
        return tree
