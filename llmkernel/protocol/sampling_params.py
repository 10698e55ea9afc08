"""SamplingParams: how one request samples, with vLLM's names and rules (engine.md D.1)."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from llmkernel.errors import UnsupportedFeatureError
from llmkernel.protocol.named_fields import NamedFields
from llmkernel.protocol.param_checks import integer, number, refusal, token_ids
from llmkernel.protocol.structured_outputs import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_SEQUENCES = 16384
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_WIRE_INTEGER = 2**63 - 1

_SWITCHES = (
    "detokenize",
    "flat_logprobs",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
MAX_SEED = 2**63 - 1


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput of a stream holds."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Only what is new since the last one."""
    FINAL_ONLY = 2
    """Nothing until the request is finished, then everything."""


class RepetitionDetectionParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, forbid_unknown_fields=True):
    """End an answer that repeats itself, with finish_reason "repetition".

    It ends when its last tokens are one pattern, of min_pattern_size to max_pattern_size tokens, min_count times in a
    row. max_pattern_size 0 = off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 2

    def __post_init__(self) -> None:
        integer("repetition_detection.max_pattern_size", self.max_pattern_size, 0)
        integer("repetition_detection.min_pattern_size", self.min_pattern_size, 0)
        integer("repetition_detection.min_count", self.min_count, 2)
        self.min_pattern_size = max(1, self.min_pattern_size)
        if 0 < self.max_pattern_size < self.min_pattern_size:
            rule = f"at least min_pattern_size = {self.min_pattern_size}, or 0"
            raise refusal("repetition_detection.max_pattern_size", self.max_pattern_size, rule)


class SamplingParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. Wrong values raise InvalidRequestError with field, value and allowed range.

    n: answers per prompt. temperature 0 = greedy. top_k 0 or -1 = off. seed: answers i of n draw with seed + i.
    stop: strings that end the text (a str or a list). max_tokens None = up to the context's end.
    logprobs: alternatives per token, 0 = the chosen token only, -1 = the whole vocabulary, None = off.
    allowed_token_ids: the only ids that may be drawn. logit_bias: id -> added to the logit, clamped to [-100, 100].
    prompt_logprobs: the same for the tokens of the prompt, which is then computed whole, cached or not.
    logprob_token_ids: the ids whose logprobs are told for every token, in place of the most likely ones.
    bad_words: strings that must not be generated. output_kind: see RequestOutputKind.
    structured_outputs: see there. extra_args: for custom logits processors.
    stream_interval: tokens from one output to the next, 1 = each at once; None = the engine's own, which lets tokens
    that come faster than a screen shows them travel together.
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
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()
        self._check_structures()
        self._refuse_unbuilt()

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """vLLM's constructor for callers that pass None for what they leave out."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a sequence of strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token that the arrays of an answer hold, None = no logprobs at all."""
        return len(self.logprob_token_ids) if self.logprob_token_ids is not None else self.logprobs

    def clone(self) -> "SamplingParams":
        """A copy that can be changed without touching this one (lists and dicts included)."""
        return msgspec.convert(msgspec.to_builtins(self, builtin_types=(), str_keys=False), SamplingParams)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.seed == -1:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.top_k == -1:
            self.top_k = 0
        if isinstance(self.temperature, (int, float)) and GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if isinstance(self.stop_token_ids, (list, tuple)):
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise refusal(
                    "logit_bias", self.logit_bias, "a dict from token id to what is added to its logit, or None"
                )
            self.logit_bias = {
                _key(key): min(100.0, max(-100.0, number("logit_bias value", value)))
                for key, value in self.logit_bias.items()
            }

    def _check_numbers(self) -> None:
        integer("n", self.n, 1, MAX_SEQUENCES)
        number("presence_penalty", self.presence_penalty, -2, 2)
        number("frequency_penalty", self.frequency_penalty, -2, 2)
        if number("repetition_penalty", self.repetition_penalty) <= 0:
            raise refusal("repetition_penalty", self.repetition_penalty, "greater than 0")
        number("temperature", self.temperature, 0, 2)
        if not 0 < number("top_p", self.top_p) <= 1:
            raise refusal("top_p", self.top_p, "in (0, 1]")
        integer("top_k", self.top_k, 0)
        number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count != -1:
                integer(name, count, 0, MAX_LOGPROBS)
        if self.stream_interval is not None:
            integer("stream_interval", self.stream_interval, 1)
        if self.n > 1 and self.is_greedy:
            raise refusal("n", self.n, "1 when temperature is 0 (greedy answers would all be equal)")

    def _check_lists(self) -> None:
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            given = words if isinstance(words, (list, tuple)) else [None]
            if words is not None and any(not isinstance(word, str) or not word for word in given):
                raise refusal(name, words, "a list of non-empty strings")
        if self.stop and not self.detokenize:
            raise refusal("stop", self.stop, "left out when detokenize is False; use stop_token_ids")
        if self.stop_token_ids:
            token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logprob_token_ids is not None:
            token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            if self.logprobs not in (None, len(self.logprob_token_ids)):
                rule = f"left out, or the number of logprob_token_ids ({len(self.logprob_token_ids)})"
                raise refusal("logprobs", self.logprobs, rule)

    def _check_structures(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise refusal(name, getattr(self, name), "True or False")
        if self.output_kind not in list(RequestOutputKind):
            raise refusal("output_kind", self.output_kind, "a RequestOutputKind")
        self.output_kind = RequestOutputKind(self.output_kind)
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise refusal("structured_outputs", self.structured_outputs, "StructuredOutputsParams(...), or None")
        if not isinstance(self.repetition_detection, (RepetitionDetectionParams, type(None))):
            raise refusal("repetition_detection", self.repetition_detection, "RepetitionDetectionParams(...), or None")
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, dict) or not all(isinstance(key, str) for key in self.extra_args):
            raise refusal("extra_args", self.extra_args, "a dict with str keys, or None")
        for key, value in self.extra_args.items():
            if isinstance(value, int):
                integer(f"extra_args[{key!r}]", int(value), -MAX_WIRE_INTEGER - 1, MAX_WIRE_INTEGER)

    def _refuse_unbuilt(self) -> None:
        unbuilt = {
            "prompt_logprob_token_ids": "is not built; use prompt_logprobs",
            "prompt_logprob_start": "is not built; use prompt_logprobs",
            "flat_logprobs": "is not built; leave it out",
            "thinking_token_budget": "needs a reasoning parser, which is not built; leave it out",
        }
        for name, what in unbuilt.items():
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise UnsupportedFeatureError(f"{name} {what}.", parameter=name)


class BeamSearchParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of beam search (vLLM's names).

    beam_width: beams that grow at once, and sequences that come back. length_penalty: a score is divided by the length
    to this power. structured_outputs is vLLM's and refused by name.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        integer("max_tokens", self.max_tokens, 1)
        number("temperature", self.temperature, 0, 2)
        number("length_penalty", self.length_penalty)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise refusal(name, getattr(self, name), "True or False")
        if self.structured_outputs is not None:
            raise UnsupportedFeatureError(
                "structured_outputs is not built for beam search; leave it out, or use generate.",
                parameter="structured_outputs",
            )


def _key(key: object) -> int:
    """A token id; a str of digits is one, as in JSON."""
    if isinstance(key, str) and key.lstrip("-").isdigit():
        key = int(key)
    return integer("logit_bias key", key)
