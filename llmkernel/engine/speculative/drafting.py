"""Drafting: what speculation keeps of one request."""

import numpy as np

from llmkernel.engine.speculative.draft_pace import DraftPace
from llmkernel.engine.speculative.ngram import find_drafts
from llmkernel.speculative_config import SpeculativeConfig

__all__ = ["Drafting"]


class Drafting:
    """The request's tokens as an array that grows with them, and the pace of its drafts."""

    __slots__ = ("_config", "_num_known", "_token_ids", "pace")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.pace = DraftPace(config.num_speculative_tokens)
        self._config = config
        self._token_ids = np.empty(0, np.int32)
        self._num_known = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Drafts, `most` of them at most, to follow `token_ids`: the same list as before, grown at its end."""
        count = min(self.pace.limit(len(token_ids)), most)
        if count < 1:
            return []
        config = self._config
        return find_drafts(
            self._known(token_ids), count, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min
        )

    def _known(self, token_ids: list[int]) -> np.ndarray:
        end = len(token_ids)
        if end > len(self._token_ids):
            grown = np.empty(end + end // 2 + 64, np.int32)
            grown[: self._num_known] = self._token_ids[: self._num_known]
            self._token_ids = grown
        self._token_ids[self._num_known : end] = token_ids[self._num_known : end]
        self._num_known = end
        return self._token_ids[:end]
