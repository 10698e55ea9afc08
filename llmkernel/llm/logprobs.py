"""Log-probabilities as users see them: a dict per position, keyed by token id (engine.md D.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmkernel.llm.tokenizer import REPLACEMENT, Tokenizer
from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["Logprob", "LogprobsProcessor", "PromptLogprobs", "SampleLogprobs"]

_REPAIR_TOKENS = 4
"""A character has at most four bytes, so at most this many tokens before it are needed to complete it."""


@dataclass(slots=True)
class Logprob:
    """One alternative at a position.

    logprob: natural logarithm, of the raw logits (temperature and penalties do not change it). rank: 1 = most likely.
    decoded_token: its text; a character that several tokens make stands with the last of them, the others have "".
    token_bytes: what it is made of, UTF-8 or a part of it: those of an answer's tokens join to its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""Per generated token: token id -> Logprob, the chosen token first, then by rank (by id where it is all of them)."""

PromptLogprobs = list[dict[int, Logprob] | None]
"""Per prompt token, in the same form; the first has None: nothing stands before it."""


class LogprobsProcessor:
    """Turns the arrays of one answer into dicts and keeps the sum. tokenizer None: no decoded_token.

    logprobs: None where they are not asked for. prompt_logprobs: None until the engine sends them.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self.logprobs: SampleLogprobs | None = None if params.num_logprobs is None else []
        self.cumulative_logprob: float | None = None if params.num_logprobs is None else 0.0
        self.prompt_logprobs: PromptLogprobs | None = None

    def update(self, lists: LogprobsLists, keep: int, context: Sequence[int]) -> None:
        """Take in the first `keep` positions of a step. `context`: all ids so far, those of this step included."""
        if self.logprobs is None or self.cumulative_logprob is None or self._params.num_logprobs is None:
            return
        count = self._params.num_logprobs
        ranked = self._params.logprob_token_ids is None
        first = len(self.logprobs)
        for row in range(keep):
            self.cumulative_logprob += float(lists.logprobs[row, 0])
            before = context[max(0, first + row - _REPAIR_TOKENS) : first + row]
            self.logprobs.append(self._entries(lists, row, count, before, ranked=ranked))

    def take_prompt(self, lists: LogprobsLists, prompt_token_ids: Sequence[int]) -> None:
        """Take in those of the whole prompt."""
        count = self._params.prompt_logprobs or 0
        self.prompt_logprobs = [None]
        for row in range(len(lists.sampled_token_ranks)):
            before = prompt_token_ids[max(0, row + 1 - _REPAIR_TOKENS) : row + 1]
            self.prompt_logprobs.append(self._entries(lists, row, count, before))

    def _entries(
        self, lists: LogprobsLists, row: int, count: int, before: Sequence[int], *, ranked: bool = True
    ) -> dict[int, Logprob]:
        """One position. before: the ids that complete a character with this one, if any do."""
        width = None if count < 0 else count + 1
        ids, values = lists.logprob_token_ids[row, :width].tolist(), lists.logprobs[row, :width].tolist()
        entries = {ids[0]: self._entry(ids[0], values[0], int(lists.sampled_token_ranks[row]), before)}
        ranks = _ranks(lists.logprobs[row, 1:]) if count < 0 else range(1, len(ids))
        for token_id, value, rank in zip(ids[1:], values[1:], ranks, strict=True):
            if token_id not in entries:
                entries[token_id] = self._entry(token_id, value, rank if ranked else None, before)
        return entries

    def _entry(self, token_id: int, value: float, rank: int | None, before: Sequence[int]) -> Logprob:
        spelled = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else None
        return Logprob(value, rank, self._text(token_id, before), spelled)

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


def _ranks(values: np.ndarray) -> Sequence[int]:
    """Rank of each of the values, 1 = the largest."""
    ranks = np.empty(len(values), np.int64)
    ranks[np.argsort(-values, kind="stable")] = np.arange(1, len(values) + 1)
    return ranks.tolist()
