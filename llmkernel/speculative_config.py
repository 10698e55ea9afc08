"""SpeculativeConfig: what EngineArgs.speculative asks for, checked at the door."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["MOST_DRAFTS", "SpeculativeConfig"]

MOST_DRAFTS = 128
"""Drafted tokens of one request in one step, at most (engine.md C.10)."""

_UNBUILT = ("draft_model", "dflash", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts by prompt lookup: the end of the text is sought in the text before it, and what followed there is tried.

    Names are vLLM's. num_speculative_tokens: drafts of a request in a step, at most; fewer where they are rejected.
    prompt_lookup_max, prompt_lookup_min: tokens of the end that are sought, the longer the better; one that is not
    given is its default or the other, whichever fits. disable_by_batch_size: no drafts where more requests run: on two
    cores four that copy are 1.6 times as fast, and four that do not lose 4 %; eight that do not lose 13 %.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    disable_by_batch_size: int = 4

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> "SpeculativeConfig":
        """Of "ngram", a dict, or the JSON text of one. InvalidRequestError, or UnsupportedFeatureError for a method."""
        options = _options(value)
        for name in options:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(str(name), cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(cls.__struct_fields__)}."
                raise _wrong(value, f"{name!r} is no setting of it; {hint}")
        _check_method(value, options.get("method"))
        for name, number in options.items():
            good = name == "method" or (isinstance(number, int) and not isinstance(number, bool) and number >= 1)
            if not good:
                raise _wrong(value, f"{name} = {number!r} must be a whole number of at least 1.")
        config = cls(**_lookup(options))
        if config.num_speculative_tokens > MOST_DRAFTS:
            raise _wrong(value, f"num_speculative_tokens = {config.num_speculative_tokens}: at most {MOST_DRAFTS}.")
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise _wrong(
                value,
                f"prompt_lookup_min = {config.prompt_lookup_min} is above"
                f" prompt_lookup_max = {config.prompt_lookup_max}; lower it.",
            )
        return config


def _options(value: object) -> dict[str, Any]:
    found = value
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return {"method": value}
        try:
            found = json.loads(value)
        except ValueError:
            raise _wrong(value, f"{value!r} is no JSON; write 'ngram', or a dict.") from None
    if not isinstance(found, Mapping):
        raise _wrong(value, f"{value!r} is no method; write 'ngram', or a dict.")
    return dict(found)


def _check_method(value: object, method: object) -> None:
    if method == "ngram":
        return
    if method in _UNBUILT:
        raise UnsupportedFeatureError(
            f"speculative: the method {method!r} is not built; use 'ngram'.", parameter="speculative", value=value
        )
    raise _wrong(value, f"{method!r} is no method; use 'ngram'." if method else "it names no method; use 'ngram'.")


def _lookup(options: dict[str, Any]) -> dict[str, Any]:
    """One bound alone moves the other's default out of its way."""
    longest, shortest = options.get("prompt_lookup_max"), options.get("prompt_lookup_min")
    if longest is not None and shortest is None:
        return options | {"prompt_lookup_min": min(2, longest)}
    if shortest is not None and longest is None:
        return options | {"prompt_lookup_max": max(5, shortest)}
    return options


def _wrong(value: object, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"speculative: {words}", parameter="speculative", value=value)
