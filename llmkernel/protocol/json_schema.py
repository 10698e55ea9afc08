"""What a JSON schema must not contain, checked before anything is sent: remote references, emptiness, endless depth."""

import json
from collections.abc import Iterator
from typing import Any

from llmkernel.errors import InvalidRequestError

__all__ = ["MAX_DEPTH", "MAX_VALUES", "check_schema", "close_objects", "parse_schema"]

MAX_DEPTH = 64
"""Objects and arrays inside one another."""

MAX_VALUES = 200_000
"""Values of a schema, keys not counted: a bound on what one with shared parts may grow to when it is written out."""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords that hold values, not schemas: a "$ref" in there is text."""

_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords that hold schemas by name: the names are no keywords."""


def parse_schema(text: str) -> dict[str, Any]:
    """A schema given as JSON text."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _refusal(f"is nested deeper than {MAX_DEPTH} levels; flatten it with $defs", text) from None
    except ValueError as error:
        raise _refusal(f"is no JSON ({error}); give a schema as a dict or as JSON text", text) from error
    if not isinstance(schema, dict):
        raise _refusal(f"must be a JSON object, not {type(schema).__name__}; an example: {{'type': 'object'}}", text)
    return schema


def check_schema(schema: dict[str, Any]) -> None:
    """InvalidRequestError for one that is too deep, too large, no JSON, empty somewhere, or refers to other documents.

    Whether the schema can be satisfied, and whether its keywords are supported, only the compiler can say.
    """
    _check_shape(schema)
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refusal(f"cannot be written as JSON ({error})", schema) from error
    subschemas = list(_subschemas(schema))
    known = {one["$id"] for one in subschemas if isinstance(one.get("$id"), str)}
    for one in subschemas:
        if one.get("enum") == []:
            raise _refusal("has an empty enum, which nothing can match; list at least one value", schema)
        for keyword in ("$ref", "$dynamicRef"):
            target = one.get(keyword)
            if isinstance(target, str) and target.partition("#")[0] not in {"", *known}:
                raise _refusal(
                    f"refers to another document, {target!r}, which is never fetched; put it under $defs", schema
                )


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy in which objects with named properties have no others, unless they say something about them."""
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    for one in _subschemas(closed):
        if "additionalProperties" not in one and ("properties" in one or "patternProperties" in one):
            one["additionalProperties"] = False
    return closed


def _check_shape(schema: dict[str, Any]) -> None:
    """Depth and size, without recursion: the dict may hold itself."""
    count = 0
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise _refusal(f"has more than {MAX_VALUES} values; make it smaller", None)
        if isinstance(value, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise _refusal(f"is nested deeper than {MAX_DEPTH} levels; flatten it with $defs", None)
            inner = value.values() if isinstance(value, dict) else value
            pending.extend((item, depth + 1) for item in inner)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise _refusal("has a key that is no string; JSON has string keys only", None)


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and every schema in it, those that only look like one left out."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            yield value
            for keyword, inner in value.items():
                if keyword in _NAMED and isinstance(inner, dict):
                    pending.extend(inner.values())
                elif keyword not in _DATA:
                    pending.append(inner)


def _refusal(problem: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"The JSON schema {problem}.", parameter="structured_outputs.json", value=value)
