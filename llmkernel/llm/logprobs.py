"""Log-probabilities as users see them: a dict per position, keyed by token id (engine.md D.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmkernel.llm.tokenizer import REPLACEMENT, Tokenizer
from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["Logprob", "LogprobsProcessor", "SampleLogprobs"]

_REPAIR_TOKENS = 4
"""A character has at most four bytes, so at most this many tokens before it are needed to complete it."""


@dataclass(slots=True)
class Logprob:
    """One alternative at a position.

    logprob: natural logarithm, of the raw logits (temperature and penalties do not change it). rank: 1 = most likely.
    decoded_token: its text; a character that several tokens make stands with the last of them, the others have "".
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""Per generated token: token id -> Logprob, the chosen token first, then by rank."""


class LogprobsProcessor:
    """Turns the arrays of one answer into dicts and keeps the sum. tokenizer None: no decoded_token."""

    def __init__(self, tokenizer: Tokenizer | None, num_logprobs: int) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self.logprobs: SampleLogprobs = []
        self.cumulative_logprob = 0.0

    def update(self, lists: LogprobsLists, keep: int, context: Sequence[int]) -> None:
        """Take in the first `keep` positions of a step. `context`: all ids so far, those of this step included."""
        rows = zip(
            lists.logprob_token_ids[:keep].tolist(),
            lists.logprobs[:keep].tolist(),
            lists.sampled_token_ranks[:keep].tolist(),
            strict=True,
        )
        first = len(self.logprobs)
        for position, (token_ids, values, chosen_rank) in enumerate(rows, start=first):
            self.cumulative_logprob += values[0]
            before = context[max(0, position - _REPAIR_TOKENS) : position]
            entries = {token_ids[0]: Logprob(values[0], chosen_rank, self._text(token_ids[0], before))}
            limit = len(token_ids) if self._num_logprobs == -1 else self._num_logprobs + 1
            for rank, (token_id, value) in enumerate(zip(token_ids[1:limit], values[1:limit], strict=True), start=1):
                if token_id not in entries:
                    entries[token_id] = Logprob(value, rank, self._text(token_id, before))
            self.logprobs.append(entries)

    def _text(self, token_id: int, before: Sequence[int]) -> str | None:
        """Text of the token; where it is only part of a character, what it makes with the tokens before it."""
        if self._tokenizer is None:
            return None
        text = self._tokenizer.token_text(token_id)
        if not text.endswith(REPLACEMENT):
            return text
        for start in range(len(before) - 1, -1, -1):
            made = self._tokenizer.text_after(before[start:], [token_id])
            if made and REPLACEMENT not in made:
                return made
        return text.rstrip(REPLACEMENT)
