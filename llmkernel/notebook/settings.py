"""The settings of a generation: option > `%llm config` > the model's generation_config > the engine's defaults."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.options import GENERATE, SETTINGS
from llmkernel.notebook.structured import structured_outputs
from llmkernel.protocol.handshake import ModelFacts
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["DEFAULT_MAX_TOKENS", "Settings", "completed", "sampling_params"]

DEFAULT_MAX_TOKENS = 512
UNLIMITED = 2**31
"""Tokens of an answer that may go on to the end of the context."""

_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "include_stop_str_in_output", "stream_interval", "bad_words",
)  # fmt: skip
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_KNOWN = {option.name for option in GENERATE}


class Settings(dict[str, Any]):
    """What `%llm config` has set; unknown names and wrong values are refused."""

    def configure(self, values: Mapping[str, Any]) -> None:
        """Set these; None takes a setting back."""
        checked = {_known_setting(name): value for name, value in values.items()}
        merged = {**self, **checked}
        sampling_params({name: value for name, value in merged.items() if value is not None})
        self.clear()
        self.update((name, value) for name, value in merged.items() if value is not None)

    def merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` over these settings; None = not given. An unknown option is refused by name."""
        for name in options:
            if name not in _KNOWN:
                raise InvalidRequestError(_unknown("option", name, _KNOWN), parameter=name)
        return {**self, **{name: value for name, value in options.items() if value is not None}}


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Merged settings, checked, with what others look up by name: n, max_tokens, logprobs, and the template as text."""
    params = sampling_params(values)
    found = {**values}
    if "params" in values:
        found |= {"n": params.n, "max_tokens": params.max_tokens or UNLIMITED, "logprobs": params.logprobs}
    template = found.get("template")
    if isinstance(template, Path):
        found["template"] = template.read_text("utf-8")
    elif not isinstance(template, str | None):
        raise InvalidRequestError(
            f"template must be the text of a jinja template, or a Path, not {type(template).__name__}.",
            parameter="template",
        )
    return found


def sampling_params(values: Mapping[str, Any], model: ModelFacts | None = None) -> SamplingParams:
    """SamplingParams of merged settings, over what the model's generation_config says. Streams deltas."""
    defaults = model.generation_defaults if model is not None else {}
    chosen = {name: defaults[name] for name in _MODEL_DEFAULTS if defaults.get(name) is not None}
    chosen |= {"max_tokens": DEFAULT_MAX_TOKENS} | _fields(values.get("params"))
    chosen |= {name: values[name] for name in _SAMPLING if name in values}
    if values.get("special_tokens"):
        chosen["skip_special_tokens"] = False
    if (constraint := structured_outputs(values)) is not None:
        chosen["structured_outputs"] = constraint
    return SamplingParams(**{**chosen, "output_kind": RequestOutputKind.DELTA})


def _fields(params: Any) -> dict[str, Any]:
    """What `params` says: a dict of some fields, or a SamplingParams, which has them all."""
    if params is None:
        return {}
    if isinstance(params, SamplingParams):
        return {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    if not isinstance(params, Mapping):
        raise InvalidRequestError(
            f"params must be SamplingParams or a dict, not {type(params).__name__}.", parameter="params", value=params
        )
    for name in params:
        if name not in SamplingParams.__struct_fields__:
            known = SamplingParams.__struct_fields__
            raise InvalidRequestError(_unknown("sampling parameter", name, known), parameter=str(name))
    return dict(params)


def _known_setting(name: str) -> str:
    plain = name.lstrip("-").replace("-", "_")
    if plain not in SETTINGS:
        raise InvalidRequestError(_unknown("setting", name, SETTINGS), parameter=name)
    return plain


def _unknown(kind: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}."
    return f"Unknown {kind} {name!r}; {hint}"
