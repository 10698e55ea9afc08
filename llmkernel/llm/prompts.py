"""The forms of a prompt: what a user may give, and what it becomes before it is checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["ChatPrompt", "PromptType", "TokenizedPrompt", "take_apart"]

PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may carry a "cache_salt"."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template, or by the one given.

    variables: what else the template may look at (enable_thinking, date_string ...).
    """

    messages: Sequence[Mapping[str, Any]]
    chat_template: str | None = None
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """text: None if token ids were given. cache_salt: only prompts with the same salt share cached prefixes."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def take_apart(prompt: PromptType) -> tuple[str | None, list[int] | None, str | None]:
    """Text, token ids (one of the two, or both) and cache salt of any form of prompt."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - _PROMPT_KEYS
        if unknown:
            raise UnsupportedFeatureError(
                f"prompt keys {sorted(map(str, unknown))} are not built; known: prompt, prompt_token_ids, cache_salt.",
                parameter="prompt",
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if (text is None or isinstance(text, str)) and (text is not None or ids is not None):
            return text, None if ids is None else _token_ids(ids), prompt.get("cache_salt")
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return None, _token_ids(prompt), None
    raise InvalidRequestError(
        f"A prompt must be a str, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', not"
        f" {type(prompt).__name__}.",
        parameter="prompt",
    )


def _token_ids(ids: Sequence[Any]) -> list[int]:
    """`ids` as plain ints (numpy's included); refuses anything else."""
    try:
        made = [token_id if type(token_id) is int else token_id.__index__() for token_id in ids]
    except (AttributeError, TypeError) as error:
        raise InvalidRequestError("Token ids must be integers.", parameter="prompt_token_ids") from error
    return made
