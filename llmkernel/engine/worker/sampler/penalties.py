"""Repetition, frequency and presence penalties, on the tokens that a request has seen and no others."""

import dataclasses

import numpy as np
import torch

__all__ = ["Penalties", "TokenCounts", "apply_penalties"]


class TokenCounts:
    """How often a request has generated each token, brought up to date by looking at the new ones only.

    ids: int64, the tokens seen, each once. counts: float32, how often each was generated; 0 = it is in the prompt only.
    Ids outside the vocabulary are left out.
    """

    def __init__(self, vocab_size: int, prompt_token_ids: list[int]) -> None:
        self._vocab_size = vocab_size
        self._prompt = list(dict.fromkeys(token for token in prompt_token_ids if 0 <= token < vocab_size))
        self._last = -1
        self._counted = 0
        self._start()

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]

    def update(self, output_token_ids: list[int]) -> None:
        """Count the tokens since the last call, or all of them where they do not continue what was counted."""
        if self._counted and output_token_ids[self._counted - 1 : self._counted] != [self._last]:
            self._start()
        for token in output_token_ids[self._counted :]:
            if 0 <= token < self._vocab_size:
                slot = self._slot(token)
                self._counts[slot] += 1
        if output_token_ids:
            self._counted, self._last = len(output_token_ids), output_token_ids[-1]

    def _start(self) -> None:
        self._slots = {token: slot for slot, token in enumerate(self._prompt)}
        self._ids = np.zeros(2 * len(self._prompt) + 64, np.int64)
        self._ids[: len(self._prompt)] = self._prompt
        self._counts = np.zeros(len(self._ids), np.float32)
        self._counted = 0

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
class Penalties:
    """What one request is penalised with. repetition 1, frequency 0, presence 0 mean off."""

    counts: TokenCounts
    repetition: float
    frequency: float
    presence: float


def apply_penalties(rows: torch.Tensor, penalties: list[tuple[int, Penalties]]) -> None:
    """Change padded rows in place; penalties: (row, what to apply to it). Repetition goes first.

    repetition: each token of prompt and output, a logit > 0 is divided, another multiplied. frequency: minus frequency
    times the count in the output. presence: minus presence for each token of the output.
    """
    index = np.concatenate([one.counts.ids + row * rows.shape[1] for row, one in penalties])
    sizes = [len(one.counts.ids) for _, one in penalties]
    settings = np.array([(one.repetition, one.frequency, one.presence) for _, one in penalties], np.float32)
    repetition, frequency, presence = torch.from_numpy(np.repeat(settings.T, sizes, axis=1)).to(rows.device)
    counts = torch.from_numpy(np.concatenate([one.counts.counts for _, one in penalties])).to(rows.device)
    flat, where = rows.view(-1), torch.from_numpy(index).to(rows.device)
    logits = flat[where]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    flat[where] = logits - frequency * counts - presence * (counts > 0)
