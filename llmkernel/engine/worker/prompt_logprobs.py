"""PromptLogprobs: the log-probabilities of one prompt's tokens, gathered chunk by chunk."""

import numpy as np

from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """Position i - 1 of the arrays is what the model said of prompt token i before it saw it; the first has nothing.

    Chunks may come again after preemption; the last word counts. width: the token itself and its alternatives.
    """

    def __init__(self, num_prompt_tokens: int, width: int) -> None:
        positions = num_prompt_tokens - 1
        self._ids = np.zeros((positions, width), np.int32)
        self._values = np.zeros((positions, width), np.float32)
        self._ranks = np.zeros(positions, np.int32)

    def put(self, first: int, lists: LogprobsLists) -> None:
        """What was said after the tokens from `first` on, of the tokens that follow them."""
        here = slice(first, first + len(lists.sampled_token_ranks))
        self._ids[here] = lists.logprob_token_ids
        self._values[here] = lists.logprobs
        self._ranks[here] = lists.sampled_token_ranks

    def lists(self) -> LogprobsLists:
        return LogprobsLists(self._ids, self._values, self._ranks)
