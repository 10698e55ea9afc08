"""StructuredOutputsParams: a constraint on the text of an answer, with vLLM's names and rules (engine.md D.8)."""

from typing import Any

import msgspec

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.protocol.json_schema import check_schema, parse_schema
from llmkernel.protocol.named_fields import NamedFields

__all__ = ["StructuredOutputsParams"]

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, forbid_unknown_fields=True):
    """What the whole answer must be: exactly one of json, regex, choice, grammar, json_object.

    json: a JSON schema, as a dict or as JSON text. json_object: any JSON object. regex: for the answer from its first
    character to its last, in the dialect of Rust's regex (no look-around, no back references). choice: one of these
    texts. grammar: Lark or GBNF. The rest is for JSON: disable_any_whitespace writes it in one line without spaces,
    whitespace_pattern is a regex of what may stand between its parts (default: up to 32 blanks and line ends),
    disable_additional_properties allows the named properties only. structural_tag is vLLM's and refused by name.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _refusal(
                "structured_outputs", given, f"exactly one of {', '.join(_KINDS[:-1])} (given: {len(given) or 'none'})"
            )
        if self.structural_tag is not None:
            raise UnsupportedFeatureError(
                "structural_tag is not built; use json, regex, choice or grammar.", parameter="structural_tag"
            )
        self._check_texts()
        self._check_options()

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of `json` or `json_object` as a dict."""
        if self.json is None:
            return {"type": "object"}
        return self.json if isinstance(self.json, dict) else parse_schema(self.json)

    def _check_texts(self) -> None:
        if self.json is not None:
            if not isinstance(self.json, (str, dict)):
                raise _refusal("json", self.json, "a JSON schema: a dict, or a str that holds one")
            check_schema(self.schema)
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str) or not text:
                raise _refusal(name, text, "a non-empty str")
            if "\0" in text:
                raise _refusal(name, text, "free of NUL characters")
        if self.choice is not None and not (
            isinstance(self.choice, (list, tuple)) and self.choice and all(isinstance(one, str) for one in self.choice)
        ):
            raise _refusal("choice", self.choice, "a non-empty list of str")
        if self.json_object not in (None, True):
            raise _refusal("json_object", self.json_object, "True, or left out")

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False")
        is_json = self.json is not None or self.json_object is not None
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and not is_json:
                raise _refusal(name, getattr(self, name), f"left out with {self.kind}: it is for json and json_object")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _refusal("whitespace_pattern", self.whitespace_pattern, "left out with disable_any_whitespace")


def _refusal(name: str, value: object, rule: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequestError(f"{name} = {shown} must be {rule}.", parameter=name, value=value)
