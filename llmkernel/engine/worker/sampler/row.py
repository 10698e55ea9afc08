"""One row of a step's logits: whose it is and what has to be done to it."""

import numpy as np

from llmkernel.engine.worker.sampler.request_state import RequestState

__all__ = ["Row"]


class Row:
    """Row `index` of the logits: its request, and what that has generated. banned: tokens it may not draw here.

    ahead: tokens of the answer, still unknown, that come before the one drawn here. cut: how it is drawn from, None =
    greedy. grammar: int32 words, bit i % 32 of word i // 32 set where token i follows its grammar; None = any may.
    """

    __slots__ = ("banned", "cut", "grammar", "index", "output", "position", "state")

    def __init__(
        self,
        index: int,
        state: RequestState,
        output_token_ids: list[int],
        grammar: np.ndarray | None = None,
        ahead: int = 0,
    ) -> None:
        self.index = index
        self.state = state
        self.cut = state.truncation
        self.output = output_token_ids
        self.position = len(output_token_ids) + ahead
        self.banned = state.banned(output_token_ids)
        self.grammar = grammar

    @property
    def is_greedy(self) -> bool:
        return self.cut is None

    @property
    def is_masked(self) -> bool:
        return bool(self.banned) or self.state.allowed is not None or self.grammar is not None

    @property
    def is_changed(self) -> bool:
        """Whether anything but temperature and truncation touches the logits."""
        return self.is_masked or self.state.bias is not None or self.state.penalties is not None

    @property
    def is_plain(self) -> bool:
        """Greedy, and nothing changes the logits: the argmax, in whatever type they come."""
        return self.is_greedy and not self.is_changed
