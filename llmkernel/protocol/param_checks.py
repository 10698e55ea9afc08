"""Checks of parameters: each error names the field, the value and what is allowed."""

import math

from llmkernel.errors import InvalidRequestError

__all__ = ["integer", "number", "refusal", "token_ids"]

_SHOWN = 80
"""Characters of a value that an error shows."""


def refusal(name: str, value: object, rule: str) -> InvalidRequestError:
    """The error that says "NAME = VALUE must be RULE."."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    return InvalidRequestError(f"{name} = {shown} must be {rule}.", parameter=name, value=value)


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` if it is a finite number within the limits."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:  # type: ignore[operator]
        limits = "a finite number" if low == -math.inf else f"a number from {low} to {high}"
        raise refusal(name, value, limits)
    return float(value)  # type: ignore[arg-type]


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` if it is an integer within the limits."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or (low is not None and value < low) or (high is not None and value > high):  # type: ignore[operator]
        limits = "an integer" if low is None else f"an integer of at least {low}" if high is None else None
        raise refusal(name, value, limits or f"an integer from {low} to {high}")
    return value  # type: ignore[return-value]


def token_ids(name: str, values: object, most: int | None = None) -> None:
    """Refuse what is not a non-empty list of ids, or holds more than `most`."""
    if not isinstance(values, (list, tuple)) or not values:
        raise refusal(name, values, "a non-empty list of token ids, or None")
    if most is not None and len(values) > most:
        raise refusal(name, values, f"a list of at most {most} token ids")
    for token_id in values:
        integer(name, token_id, 0)
