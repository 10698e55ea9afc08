"""ChatTemplate: messages to the text of a prompt, in transformers' dialect of jinja2, sandboxed and with a deadline."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.chat_environment import ChatEnvironment, deadline

__all__ = ["ChatTemplate"]

_SECONDS = 2.0
"""Time that one rendering may take."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message may carry its reasoning; templates read the first, some the second."""


class ChatTemplate:
    """A chat template, compiled once.

    Renders what transformers' apply_chat_template renders (see ChatEnvironment). A template sees plain data only:
    whatever is passed in is copied into dicts, lists, strings and numbers. special_tokens: name -> text, what a
    template knows as bos_token, eos_token ... seconds: time that one rendering may take.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, seconds: float = _SECONDS
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._seconds = seconds
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequestError(
                f"The chat template has a syntax error in line {error.lineno}: {error.message}; correct it, or send the"
                " text as it is.",
                parameter="chat_template",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. `variables` are seen by the template (enable_thinking, date_string ...)."""
        token = deadline.set(time.monotonic() + self._seconds)
        try:
            return self._template.render(
                messages=_checked_messages(messages),
                tools=_plain(tools),
                documents=_plain(documents),
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **_plain(variables)},
            )
        except InvalidRequestError:
            raise
        except Exception as error:
            # a template is a program of its own and may raise anything
            raise InvalidRequestError(
                f"The chat template refused the messages: {error}; change them, or give another template.",
                parameter="chat_template",
            ) from error
        finally:
            deadline.reset(token)


@functools.cache
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise InvalidRequestError(
            "messages must be a non-empty list of dicts such as {'role': 'user', 'content': 'Hi'}.",
            parameter="messages",
        )
    plain = [_plain(message) for message in messages]
    for given, message in zip(messages, plain, strict=True):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"A message must be a dict with a 'role' and a 'content', not {given!r:.80}.", parameter="messages"
            )
    return [_with_reasoning(_told(message)) for message in plain]


def _told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is None: some APIs give content=None beside tool calls, and templates would write it."""
    return {key: value for key, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """`value` as plain data; what is none becomes a placeholder that names its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # a pydantic model
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
