"""Grammar and GrammarBackend: the small door to whatever library knows grammars (engine.md C.12)."""

import abc
from collections.abc import Sequence

import numpy as np

from llmkernel.protocol.structured_outputs import StructuredOutputsParams

__all__ = ["Grammar", "GrammarBackend", "GrammarError"]


class GrammarError(Exception):
    """A grammar cannot be compiled or has run into a limit; the message is a clause without a full stop, for people."""


class Grammar(abc.ABC):
    """How far one answer has got in its grammar. One thread uses it at a time.

    The end tokens belong to the grammar: they are allowed exactly where the answer may end. num_words: int32 words of a
    mask, the same for all grammars of a back end; it covers at least the vocabulary of the tokenizer.
    """

    num_words: int

    @property
    @abc.abstractmethod
    def is_terminated(self) -> bool:
        """Nothing can follow: the answer is complete, or an end token was accepted."""

    @abc.abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens.

        GrammarError: they do not follow, or a limit is reached; the grammar is of no use any more.
        """

    @abc.abstractmethod
    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest beginning of `token_ids` that the grammar allows; nothing changes."""

    @abc.abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""

    @abc.abstractmethod
    def fill_bitmask(self, words: np.ndarray) -> None:
        """Set bit i % 32 of int32 word i // 32 for every token i that may come next, clear the others.

        GrammarError where the grammar has run into a limit.
        """

    @abc.abstractmethod
    def copy(self) -> "Grammar":
        """Another answer that stands where this one does."""


class GrammarBackend(abc.ABC):
    """Compiles grammars for one tokenizer, in any thread."""

    @abc.abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its start; GrammarError says why there is none."""
