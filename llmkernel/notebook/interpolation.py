"""Fills `{name}` and `{name.attribute}` into a prompt where the name is known, and leaves every other brace alone."""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["fields", "interpolate"]

_FIELD = re.compile(r"\{([^\W\d]\w*(?:\.[^\W\d]\w*)*)\}")
_MISSING = object()


def interpolate(text: str, values: Mapping[str, Any]) -> str:
    """`text` with known fields replaced, in one pass: what a value holds is never looked at again."""

    def fill(found: re.Match[str]) -> str:
        value = _look_up(found[1], values)
        return found[0] if value is _MISSING else str(value)

    return _FIELD.sub(fill, text)


def fields(text: str) -> set[str]:
    """First names of the fields in `text`, known or not."""
    return {found.split(".")[0] for found in _FIELD.findall(text)}


def _look_up(path: str, values: Mapping[str, Any]) -> Any:
    if path in values:  # a column may have a dot in its name
        return values[path]
    name, *attributes = path.split(".")
    value = values.get(name, _MISSING)
    for attribute in attributes:
        if value is _MISSING:
            break
        value = getattr(value, attribute, _MISSING)
    return value
