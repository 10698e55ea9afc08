"""Bounds on what one step of a chat template may make: a template must not fill the memory."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from llmkernel.errors import InvalidRequestError

__all__ = ["check_operation", "check_sizes", "guarded", "joined"]

_MAX_SIZE = 2**24
"""Characters or items of any text or list that a template puts together."""

_MAX_PRODUCT = 2**27
"""The two largest sizes that one call works on, multiplied: what replace, center or join could make at worst."""

_MAX_REPEAT = 1_000_000
"""Characters or items that `*` may make, and bits that `**` may make."""

_WIDE = re.compile(r"\d{7,}|\*")
"""A width in a format."""


def joined(pieces: Iterable[str]) -> str:
    """The pieces of an output as one text."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > _MAX_SIZE:
            _refuse()
        kept.append(piece)
    return "".join(kept)


def check_sizes(*values: Any) -> None:
    """Refuse a call whose result could be too large."""
    sizes = sorted(map(_size, values), reverse=True)
    if sizes and sizes[0] * (sizes[1] if len(sizes) > 1 else 1) > _MAX_PRODUCT:
        _refuse()


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse a `*`, `**`, `+` or `%` whose result would be too large."""
    for value, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(times, int):
            _limit(len(value) * times, _MAX_REPEAT)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        _limit(left.bit_length() * right, _MAX_REPEAT)
    if operator == "+" and isinstance(left, (str, list, tuple)):
        _limit(_size(left) + _size(right), _MAX_SIZE)
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        _refuse()


def guarded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at sizes first. What it is marked with (pass_environment ...) goes with it."""

    @functools.wraps(filter)
    def looks_first(*args: Any, **kwargs: Any) -> Any:
        check_sizes(*args, *kwargs.values())
        if filter.__name__ == "do_format":
            check_operation("%", args[0], None)
        return filter(*args, **kwargs)

    return looks_first


def _size(value: Any) -> int:
    if isinstance(value, (str, list, tuple, dict)):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _limit(size: int, most: int) -> None:
    if size > most:
        _refuse()


def _refuse() -> NoReturn:
    raise InvalidRequestError(
        "The chat template asks for too much memory; give another template.", parameter="chat_template"
    )
