"""Answers of a given form: the options that ask for one (--json-schema, --regex ...), and such an answer as data."""

import json
from collections.abc import Mapping
from typing import Any

from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.structured_outputs import StructuredOutputsParams

__all__ = ["parsed_answer", "structured_outputs"]

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


def structured_outputs(options: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The constraint that `options` name; None if they name none, InvalidRequestError if they name several.

    json_schema: a dict, JSON text, a pydantic model or a pydantic TypeAdapter. Objects get the properties that it names
    and no others, unless it says something about others: a small model would think of more for ever.
    """
    kind = _kind(options)
    if kind is None:
        return None
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(options[kind]), disable_additional_properties=True)
    if kind == "choice" and isinstance(options[kind], str):
        return StructuredOutputsParams(choice=[options[kind]])
    return StructuredOutputsParams(**{kind: options[kind]})


def parsed_answer(options: Mapping[str, Any], text: str) -> Any:
    """A whole answer as data: JSON as Python values, or as an instance of the pydantic model that was asked for; other
    kinds as they are. None if it is not whole, if the model's own validators refuse it, or if nothing was asked for."""
    kind = _kind(options)
    if kind is None:
        return None
    if kind not in ("json_schema", "json_object"):
        return text
    try:
        value = json.loads(text)
        model = options.get("json_schema")
        for validate in ("model_validate", "validate_python"):  # a pydantic model, a TypeAdapter
            if callable(getattr(model, validate, None)):
                return getattr(model, validate)(value)
    except ValueError:  # no JSON, or what pydantic's own rules, beyond the schema, refuse
        return None
    return value


def _kind(options: Mapping[str, Any]) -> str | None:
    given = [kind for kind in _KINDS if options.get(kind) not in (None, False)]
    if len(given) > 1:
        first, second = ("--" + kind.replace("_", "-") for kind in given[:2])
        raise InvalidRequestError(f"{first} and {second} exclude each other; give one.", parameter="structured_outputs")
    return given[0] if given else None


def _schema(given: Any) -> str | dict[str, Any]:
    if isinstance(given, str | dict):
        return given
    for make in ("model_json_schema", "json_schema"):  # a pydantic model, a TypeAdapter
        if callable(getattr(given, make, None)):
            schema: dict[str, Any] = getattr(given, make)()
            return schema
    raise InvalidRequestError(
        f"json_schema must be a dict, JSON text or a pydantic model, not {type(given).__name__}.",
        parameter="structured_outputs.json",
        value=given,
    )
