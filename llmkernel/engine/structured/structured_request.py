"""StructuredRequest: what the engine keeps of one request whose answer has to follow a grammar."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from llmkernel.engine.structured.grammar import Grammar, GrammarError

__all__ = ["StructuredRequest"]


class StructuredRequest:
    """A grammar that is being compiled, and then followed.

    compiled: of the grammar at its start, which other requests may share. withheld: end tokens that are allowed only
    where nothing else is (ignore_eos). error: why the grammar is of no use, None while it is.
    """

    __slots__ = ("_compiled", "_grammar", "_withheld", "error")

    def __init__(self, compiled: "Future[Grammar]", withheld: Sequence[int] = ()) -> None:
        self.error: str | None = None
        self._compiled = compiled
        self._grammar: Grammar | None = None
        self._withheld = list(withheld)

    @property
    def is_compiled(self) -> bool:
        """It can be followed now, or it never can (`error`)."""
        return self._compiled.done()

    @property
    def num_words(self) -> int:
        """int32 words of its mask."""
        return self._grammar.num_words if self._grammar is not None else 0

    @property
    def is_terminated(self) -> bool:
        """The answer is complete."""
        return self._grammar is not None and self._grammar.is_terminated

    def start(self) -> None:
        """Begin to follow the grammar, once it is compiled; the first time only."""
        if self._grammar is None and self.error is None:
            failure = self._compiled.exception()
            if failure is None:
                self._grammar = self._compiled.result().copy()
            else:
                self.error = str(failure) or type(failure).__name__

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, with `error`, if the grammar does not allow it."""
        assert self._grammar is not None
        try:
            self._grammar.accept_tokens([token_id])
        except GrammarError as error:
            self.error = f"The grammar of structured_outputs cannot go on ({error}); make it simpler."
        return self.error is None

    def allowed_drafts(self, token_ids: Sequence[int]) -> list[int]:
        """The beginning of `token_ids` that the grammar allows and that does not complete the answer."""
        assert self._grammar is not None
        ahead = self._grammar.copy()
        allowed: list[int] = []
        with contextlib.suppress(GrammarError):  # a limit, which this answer may never reach
            for token_id in ahead.validate_tokens(token_ids):
                ahead.accept_tokens([token_id])
                if ahead.is_terminated:
                    break
                allowed.append(token_id)
        return allowed

    def fill_bitmasks_ahead(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Row i of int32 `rows` [drafts, words]: what may follow draft i, all clear behind a place where it fails.

        drafts: see allowed_drafts. Nothing changes here: the masks of a draft that is rejected are never looked at.
        """
        assert self._grammar is not None
        ahead = self._grammar.copy()
        rows.fill(0)
        with contextlib.suppress(GrammarError):  # told when the answer has come so far
            for token_id, words in zip(drafts, rows, strict=True):
                ahead.accept_tokens([token_id])
                ahead.fill_bitmask(words)
                if self._withheld:
                    self._withhold(words)

    def fill_bitmask(self, words: np.ndarray) -> None:
        """The tokens that may come next: see Grammar.fill_bitmask. All clear where the grammar fails: see `error`."""
        assert self._grammar is not None
        try:
            self._grammar.fill_bitmask(words)
        except GrammarError as error:
            words.fill(0)
            self.error = f"The grammar of structured_outputs cannot go on ({error}); make it simpler."
            return
        if self._withheld:
            self._withhold(words)

    def _withhold(self, words: np.ndarray) -> None:
        others = words.view(np.uint32).copy()
        for token_id in self._withheld:
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if others.any():
            words[:] = others.view(np.int32)
