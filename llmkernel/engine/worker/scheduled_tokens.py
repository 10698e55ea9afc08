"""ScheduledTokens: what one request adds in a step, as the attention sees it."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import numpy as np

__all__ = ["SHORT_CHUNK", "Padding", "ScheduledTokens", "apart", "attention_order", "block_table"]

SHORT_CHUNK = 16
"""Tokens up to which chunks attend in groups: drafts, and what a cached prefix leaves of a prompt."""

PIECE = 256
"""Tokens up to which a chunk attends to all that is kept, and masks; longer ones save by leaving out what they hide."""

_MIXED = 8
"""Decodes and short chunks up to which they attend together, padded to the longest chunk: one call instead of two."""


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
    def is_few(self) -> bool:
        """A decode, or a short chunk behind a text."""
        return self.num_tokens == 1 or (self.num_tokens <= SHORT_CHUNK and self.num_computed > 0)

    @property
    def is_piece(self) -> bool:
        """A part of a prompt, read beside decodes, and not the first: what it sees is worth keeping for the next."""
        return SHORT_CHUNK < self.num_tokens <= PIECE and self.num_computed > 0

    def first_seen(self, window: int | None) -> int:
        """The first position that the first of these tokens sees."""
        return 0 if window is None else max(0, self.num_computed + 1 - window)


@dataclasses.dataclass(frozen=True)
class Padding:
    """Some sequences made equally long by repeating the last token of each: [requests, tokens], tokens the most of one.

    positions: int64 [requests, tokens]. rows: int64 [requests * tokens], of the tokens one after the other. kept: which
    of the padded are true ones; None: all.
    """

    positions: np.ndarray
    rows: np.ndarray
    kept: np.ndarray | None

    @classmethod
    def of(cls, sequences: Sequence[ScheduledTokens]) -> "Padding":
        counts = np.array([sequence.num_tokens for sequence in sequences])[:, None]
        firsts = np.array([sequence.num_computed for sequence in sequences])[:, None]
        tokens = np.arange(counts.max())
        places = np.minimum(tokens, counts - 1)
        true = tokens < counts
        rows = np.cumsum(counts, axis=0) - counts + places
        return cls(firsts + places, rows.ravel(), None if true.all() else np.flatnonzero(true))


def apart(few: Sequence[ScheduledTokens]) -> list[list[ScheduledTokens]]:
    """Decodes and short chunks, in attention_order, as they attend: together, or apart where they are many."""
    if len(few) <= _MIXED:
        return [list(few)]
    return [list(part) for _, part in itertools.groupby(few, lambda sequence: sequence.num_tokens > 1)]


def attention_order(sequences: Sequence[ScheduledTokens]) -> list[int]:
    """The places of `sequences` in the order in which they attend: what is few, by context length, then long chunks.

    Where many are few, decodes come before short chunks.
    """
    are_apart = sum(sequence.is_few for sequence in sequences) > _MIXED

    def key(place: int) -> tuple[bool, bool, int]:
        sequence = sequences[place]
        return not sequence.is_few, are_apart and sequence.num_tokens > 1, sequence.num_computed

    return sorted(range(len(sequences)), key=key)


def block_table(
    group: Sequence[ScheduledTokens], firsts: Sequence[int] | np.ndarray, blocks: int, size: int
) -> np.ndarray:
    """Block ids from the first one that each sees, int64 [requests, blocks], the null block behind the last."""
    table = np.zeros((len(group), blocks), dtype=np.int64)
    for row, (sequence, first) in enumerate(zip(group, firsts, strict=True)):
        used = sequence.block_ids[first : -(-sequence.context // size)]
        table[row, : len(used)] = used
    return table
