"""Repetition, frequency and presence penalties, on the tokens that a request has seen and no others."""

import dataclasses

import numpy as np
import torch

__all__ = ["PenaltyRow", "TokenCounts", "apply_penalties"]


class TokenCounts:
    """How often a request has generated each token, kept up to date by looking at the new ones only.

    ids: the tokens seen, each once; counts: how often each was generated (0: it stands in the prompt only). Ids outside
    the vocabulary are left out.
    """

    def __init__(self, vocab_size: int, prompt_token_ids: list[int]) -> None:
        self._vocab_size = vocab_size
        self._prompt = list(dict.fromkeys(t for t in prompt_token_ids if 0 <= t < vocab_size))
        self._start()

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]

    def update(self, output_token_ids: list[int]) -> None:
        """Count the tokens since the last call; from the start when these do not continue what was counted."""
        known = self._counted
        if known > len(output_token_ids) or (known and output_token_ids[known - 1] != self._last):
            self._start()
        for token in output_token_ids[self._counted :]:
            if 0 <= token < self._vocab_size:
                self._counts[self._slot(token)] += 1
        if output_token_ids:
            self._counted, self._last = len(output_token_ids), output_token_ids[-1]

    def _start(self) -> None:
        capacity = 2 * len(self._prompt) + 64
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(self._prompt)] = self._prompt
        self._counts = np.zeros(capacity, np.float32)
        self._slots = {token: slot for slot, token in enumerate(self._prompt)}
        self._counted, self._last = 0, -1

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        return slot


@dataclasses.dataclass(frozen=True, slots=True)
class PenaltyRow:
    """A row of a batch and what it is penalised with."""

    row: int
    counts: TokenCounts
    repetition: float
    frequency: float
    presence: float


def apply_penalties(rows: torch.Tensor, penalties: list[PenaltyRow]) -> None:
    """Change float32 `rows` in place: repetition first (logit > 0: divided, else multiplied), then the other two.

    repetition: every token of prompt and output. frequency: minus frequency * count in the output. presence: minus
    presence for each token of the output.
    """
    sizes = [len(p.counts.ids) for p in penalties]
    index = np.concatenate([p.counts.ids + p.row * rows.shape[1] for p in penalties])
    settings = np.array([(p.repetition, p.frequency, p.presence) for p in penalties], np.float32)
    repetition, frequency, presence = torch.from_numpy(np.repeat(settings.T, sizes, axis=1)).to(rows.device)
    counts = torch.from_numpy(np.concatenate([p.counts.counts for p in penalties])).to(rows.device)
    flat, where = rows.view(-1), torch.from_numpy(index).to(rows.device)
    logits = flat[where]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    flat[where] = logits - frequency * counts - presence * (counts > 0)
