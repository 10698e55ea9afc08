"""GuidanceBackend: grammars by llguidance. It works on derivatives of regular expressions and an Earley parser, so
compiling takes no tables and masks are computed as they are needed, within limits of its own."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from llmkernel.engine.structured.grammar import Grammar, GrammarBackend, GrammarError
from llmkernel.protocol.handshake import TokenizerFacts
from llmkernel.protocol.json_schema import close_objects
from llmkernel.protocol.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["GuidanceBackend", "GuidanceGrammar"]

_PROBE = "a b"
"""What every tokenizer must read as it is written."""

_WHITESPACE = r"[ \t\n\r]{1,32}"
"""Between the parts of a JSON text unless a request says otherwise: room for indentation, and an end for models that
would write blanks for ever."""

_CAUSE = re.compile(r"^error: (.+)$", re.MULTILINE)
_DEAD_END = "no text can match it"
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


class GuidanceGrammar(Grammar):
    """A matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self.num_words = num_words
        self._matcher = matcher

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(_one_line(self._matcher.get_error()))

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids[: self._matcher.validate_tokens(list(token_ids))])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError(_one_line(self._matcher.get_error()))

    def fill_bitmask(self, words: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)
            raise GrammarError(_one_line(self._matcher.get_error()))

    def copy(self) -> "GuidanceGrammar":
        return GuidanceGrammar(self._matcher.deep_copy(), self.num_words)


class GuidanceBackend(GrammarBackend):
    """vocab_size: ids that the model can emit. end_token_ids: tokens that end a text."""

    def __init__(self, facts: TokenizerFacts, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Takes half a second for 50,000 tokens. GrammarError for a tokenizer that llguidance cannot read."""
        if facts.json is None and facts.path is None:
            raise GrammarError("the model has no tokenizer")
        text = facts.json if facts.json is not None else Path(str(facts.path)).read_text("utf-8")
        description = json.loads(text)
        description["decoder"] = _readable(description.get("decoder"))
        size = max(vocab_size, _highest_id(description) + 1)
        self._limits = LLParserLimits(verbose_errors=False)
        try:
            # Never anything but JSON: llguidance takes other strings for names of files.
            self._tokenizer = LLTokenizer(json.dumps(description), n_vocab=size, eos_token=list(end_token_ids) or None)
            found = self._tokenizer.decode_str(self._tokenizer.tokenize_str(_PROBE))
            if found.strip() != _PROBE:
                raise ValueError(f"it reads {_PROBE!r} as {found!r}")
        except Exception as error:  # llguidance raises what its parts raise
            raise GrammarError(
                f"the model's tokenizer is of a kind that the grammar library cannot read ({_one_line(str(error))})"
            ) from error
        self._num_words = -(-size // 32)

    def compile(self, params: StructuredOutputsParams) -> GuidanceGrammar:
        matcher = LLMatcher(self._tokenizer, _source(params), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        grammar = GuidanceGrammar(matcher, self._num_words)
        _check_start(grammar.copy())
        return grammar


def _check_start(grammar: Grammar) -> None:
    """Some grammars compile and match nothing."""
    words = np.zeros(grammar.num_words, np.int32)
    grammar.fill_bitmask(words)
    if not words.any():
        raise GrammarError(_DEAD_END)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form."""
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        # One lexeme: thousands of choices as rules would be more than the parser takes in a row.
        choices = " | ".join(json.dumps(one) for one in params.choice)
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    if params.grammar is not None:
        try:
            return str(LLMatcher.grammar_from_lark(any_to_lark(params.grammar)))
        except Exception as error:  # its parser raises several kinds
            raise GrammarError(_one_line(str(error))) from error
    schema = close_objects(params.schema) if params.disable_additional_properties else params.schema
    options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or _WHITESPACE
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _readable(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """A decoder that llguidance understands: it takes "▁" for a space where a Replace says so, and not Metaspace."""
    if decoder is None:
        return None
    if decoder["type"] == "Sequence":
        return decoder | {"decoders": [_readable(one) for one in decoder["decoders"]]}
    if decoder["type"] == "Metaspace":
        replace = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
        return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return decoder


def _highest_id(tokenizer: dict[str, Any]) -> int:
    """Of the vocabulary in a tokenizer.json: a mask must reach that far."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max([highest, *(int(token["id"]) for token in tokenizer.get("added_tokens", ()))])


def _one_line(error: str) -> str:
    """What is wrong, out of a message that may quote the grammar, point into it, and describe the parser's state."""
    error = error.partition("\n<state>")[0].strip()
    cause = _CAUSE.search(error)
    if cause is not None:
        return f"invalid regex: {cause.group(1)}"
    if "coerce_one_of" in error:
        return "oneOf is supported where its branches exclude each other only; use anyOf"
    line = _PLACE.sub("", error.partition("\n")[0]).rstrip(".:")
    return _DEAD_END if line in ("", "NoExtensionBias") else line
