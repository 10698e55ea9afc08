"""Prompt: what one row of a generation is asked; and the rows that `--prompts VAR` means."""

import dataclasses
import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.interpolation import fields, interpolate
from llmkernel.protocol.handshake import ModelFacts
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["Prompt", "Sent", "prompts_from"]


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request as the engine got it: ids, parameters with the effective seed; facts: of the model that answered."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    facts: ModelFacts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """text: the user's turn, or the whole prompt of a raw request. error: why it cannot be asked, if it cannot.

    before: earlier turns of the conversation, as messages. again: what was sent to each model, by its name: to be sent
    again as it is.
    """

    text: str
    error: InvalidRequestError | None = None
    before: tuple[Mapping[str, str], ...] = ()
    again: "Mapping[str, Sent] | None" = None


def prompts_from(
    items: Any, template: str | None = None, *, name: str = "prompts", variables: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """One prompt per item of a list, Series, array or DataFrame; of any iterable but a string.

    template: text with {prompt}, or with the item's keys or columns; None sends the items as they are. name: of the
    variable, for messages. variables: further names that the template may use.
    """
    rows = _rows(items, name)
    if not rows:
        raise InvalidRequestError(f"{name} is empty; there is nothing to ask.", parameter="prompts")
    if template is None:
        return [_plain(row, name, number) for number, row in enumerate(rows, 1)]
    known = set().union(*(_names(row) for row in rows))
    if not known & fields(template):
        names = ", ".join(f"{{{field}}}" for field in sorted(known, key=str))
        raise InvalidRequestError(
            f"The body does not say where the items of {name} go; write {names} in it.", parameter="prompts"
        )
    return [_filled(row, template, name, number, variables or {}) for number, row in enumerate(rows, 1)]


def _rows(items: Any, name: str) -> list[Any]:
    if hasattr(items, "to_dict") and hasattr(items, "columns"):  # a DataFrame, without importing pandas
        return list(items.to_dict("records"))
    if hasattr(items, "tolist"):  # a Series or an array
        items = items.tolist()
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        kind = type(items).__name__
        raise InvalidRequestError(
            f"{name} is a {kind}, not a list of prompts; put it into a list: [{name}].", parameter="prompts"
        )
    return list(items)


def _names(row: Any) -> set[str]:
    return set(map(str, row)) if isinstance(row, Mapping) else {"prompt"}


def _plain(row: Any, name: str, number: int) -> Prompt:
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise InvalidRequestError(
                f"{name} has no column or key 'prompt' ({', '.join(map(str, row))}); use %%generate --prompts {name}"
                " and write a template.",
                parameter="prompts",
            )
        row = row["prompt"]
    return _missing(name, number) if _is_missing(row) else Prompt(str(row))


def _filled(row: Any, template: str, name: str, number: int, variables: Mapping[str, Any]) -> Prompt:
    if not isinstance(row, Mapping):
        if _is_missing(row):
            return _missing(name, number)
        row = {"prompt": row}
    values = {str(key): value for key, value in row.items()}
    gaps = [field for field in sorted(fields(template)) if field in values and _is_missing(values[field])]
    if gaps:
        return _missing(name, number, gaps[0])
    return Prompt(interpolate(template, ChainMap(values, dict(variables))))


def _is_missing(value: Any) -> bool:
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas', which need not be installed
        return True
    return value is None or (isinstance(value, float) and math.isnan(value))


def _missing(name: str, number: int, field: str = "") -> Prompt:
    what = f"has no {field}" if field else "is missing"
    return Prompt("", InvalidRequestError(f"Item {number} of {name} {what}; fill it in.", parameter="prompts"))
