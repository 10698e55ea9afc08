"""SamplingParams: how one request samples, with vLLM's names and rules (engine.md D.1)."""

import enum
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_SEQUENCES = 16384
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput of a stream holds."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Only what is new since the last one."""
    FINAL_ONLY = 2
    """Nothing until the request is finished, then everything."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the text: exactly one of the fields. Refused by name until structured output is built."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. Wrong values raise InvalidRequestError with field, value and allowed range.

    n: answers per prompt. temperature 0 = greedy. top_k 0 or -1 = off. seed: answers i of n draw with seed + i.
    stop: strings that end the text (a str or a list). max_tokens None = up to the context's end.
    logprobs: alternatives per token, 0 = the chosen token only, -1 = the whole vocabulary, None = off.
    allowed_token_ids: the only ids that may be drawn. logit_bias: id -> added to the logit, clamped to [-100, 100].
    bad_words: strings that must not be generated. output_kind: see RequestOutputKind.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()
        if self.structured_outputs is not None:
            raise UnsupportedFeatureError(
                "structured_outputs is not built yet; leave it out.", parameter="structured_outputs"
            )
        if self.prompt_logprobs is not None:
            raise UnsupportedFeatureError("prompt_logprobs is not built yet; leave it out.", parameter="prompt_logprobs")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a sequence of strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop

    def clone(self) -> "SamplingParams":
        """A copy that can be changed without touching this one (lists and dicts included)."""
        return msgspec.convert(msgspec.to_builtins(self, builtin_types=(), str_keys=False), SamplingParams)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.top_k == -1:
            self.top_k = 0
        if isinstance(self.temperature, (int, float)) and GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.stop_token_ids is not None:
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.logit_bias is not None:
            self.logit_bias = {
                _integer("logit_bias key", key): min(100.0, max(-100.0, _number("logit_bias value", value)))
                for key, value in self.logit_bias.items()
            }

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_SEQUENCES)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if _number("repetition_penalty", self.repetition_penalty) <= 0:
            raise _refusal("repetition_penalty", self.repetition_penalty, "greater than 0")
        _number("temperature", self.temperature, 0, 2)
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise _refusal("top_p", self.top_p, "in (0, 1]")
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.logprobs is not None and self.logprobs != -1:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1)
        if self.n > 1 and self.is_greedy:
            raise _refusal("n", self.n, "1 when temperature is 0 (greedy answers would all be equal)")

    def _check_lists(self) -> None:
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            if words is not None and any(not isinstance(word, str) or not word for word in words):
                raise _refusal(name, words, "a list of non-empty strings")
        if self.stop and not self.detokenize:
            raise _refusal("stop", self.stop, "left out when detokenize is False; use stop_token_ids")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids)):
            for token_id in ids or ():
                _integer(name, token_id, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _refusal("allowed_token_ids", self.allowed_token_ids, "non-empty, or None")


class BeamSearchParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of beam search (vLLM's names). Beam search is refused by name until it is built."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


def _refusal(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} = {value!r} must be {rule}.", parameter=name, value=value)


def _number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:  # type: ignore[operator]
        limits = "a finite number" if low == -math.inf else f"a number from {low} to {high}"
        raise _refusal(name, value, limits)
    return float(value)  # type: ignore[arg-type]


def _integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    if isinstance(value, str) and name == "logit_bias key" and value.lstrip("-").isdigit():
        value = int(value)
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or (low is not None and value < low) or (high is not None and value > high):  # type: ignore[operator]
        limits = "an integer" if low is None else f"an integer of at least {low}" if high is None else None
        raise _refusal(name, value, limits or f"an integer from {low} to {high}")
    return value  # type: ignore[return-value]
