"""ScheduledTokens: what one request adds in a step, as the attention sees it."""

import dataclasses
from collections.abc import Hashable

import numpy as np

__all__ = ["SHORT_CHUNK", "ScheduledTokens"]

SHORT_CHUNK = 16
"""Tokens up to which chunks attend in groups: drafts, and what a cached prefix leaves of a prompt."""


@dataclasses.dataclass(frozen=True)
class ScheduledTokens:
    """Tokens of one request in this step: `num_tokens` of them, after `num_computed` that the cache holds.

    block_ids: int64, in order. owner: the request itself, the same object in every step; None: unknown.
    """

    num_tokens: int
    num_computed: int
    block_ids: np.ndarray
    owner: Hashable = None

    @property
    def context(self) -> int:
        """Tokens in the cache once this step's are written."""
        return self.num_computed + self.num_tokens

    @property
    def is_short_chunk(self) -> bool:
        return 1 < self.num_tokens <= SHORT_CHUNK and self.num_computed > 0

    def first_seen(self, window: int | None) -> int:
        """The first position that the first of these tokens sees."""
        return 0 if window is None else max(0, self.num_computed + 1 - window)
