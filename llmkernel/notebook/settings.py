"""The settings of a generation: option > `%llm config` > the model's generation_config > the engine's defaults."""

import difflib
from collections.abc import Mapping
from typing import Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.options import GENERATE, SETTINGS
from llmkernel.protocol.handshake import ModelFacts
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["DEFAULT_MAX_TOKENS", "Settings", "sampling_params"]

DEFAULT_MAX_TOKENS = 512

_SAMPLING = ("max_tokens", "temperature", "n", "seed", "top_p", "top_k", "min_p", "stop", "logprobs")
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


def sampling_params(values: Mapping[str, Any], model: ModelFacts | None = None) -> SamplingParams:
    """SamplingParams of merged settings, over what the model's generation_config says. Streams deltas."""
    defaults = model.generation_defaults if model is not None else {}
    chosen = {name: defaults[name] for name in _MODEL_DEFAULTS if defaults.get(name) is not None}
    chosen |= {"max_tokens": DEFAULT_MAX_TOKENS} | {name: values[name] for name in _SAMPLING if name in values}
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **chosen)


def _known_setting(name: str) -> str:
    plain = name.lstrip("-").replace("-", "_")
    if plain not in SETTINGS:
        raise InvalidRequestError(_unknown("setting", name, SETTINGS), parameter=name)
    return plain


def _unknown(kind: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}."
    return f"Unknown {kind} {name!r}; {hint}"
