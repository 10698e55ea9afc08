"""Biases and hard masks on padded rows, in place. Masks come last, so that nothing brings a forbidden token back."""

import numpy as np
import torch

__all__ = ["add_bias", "banned_by_bad_words", "forbid", "keep_allowed", "keep_only"]

_BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED = _BYTES.astype(np.float32)
"""Byte of a bit mask -> what it adds to eight logits: 0 where a bit is set, else -inf."""


def add_bias(rows: torch.Tensor, biases: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """biases: (row, distinct int64 token ids, float32 to add to the logit of each)."""
    index = np.concatenate([ids + row * rows.shape[1] for row, ids, _ in biases])
    added = np.concatenate([values for _, _, values in biases])
    rows.view(-1)[torch.from_numpy(index).to(rows.device)] += torch.from_numpy(added).to(rows.device)


def keep_only(row: torch.Tensor, allowed: torch.Tensor) -> None:
    """-inf for every token of one row [n] but the `allowed` ids."""
    kept = row[allowed]
    row.fill_(-torch.inf)
    row[allowed] = kept


def keep_allowed(row: torch.Tensor, words: np.ndarray) -> None:
    """-inf for every token of one row [n] whose bit in the int32 `words` is clear, or that they do not reach.

    By table and addition: on a CPU that takes a tenth of the time of masked_fill. The row must not hold +inf or NaN.
    """
    added = torch.from_numpy(_ADDED.take(words.view(np.uint8), axis=0).reshape(-1)[: len(row)])
    row[: len(added)] += added.to(row.device)
    row[len(added) :] = -torch.inf


def forbid(rows: torch.Tensor, banned: list[tuple[int, list[int]]]) -> None:
    """-inf for the token ids of each (row, token ids)."""
    index = [row * rows.shape[1] + token for row, tokens in banned for token in tokens]
    rows.view(-1)[torch.tensor(index, dtype=torch.int64, device=rows.device)] = -torch.inf


def banned_by_bad_words(words: list[list[int]], output_token_ids: list[int]) -> list[int]:
    """The tokens that would complete one of `words`: its other ids end the output. The prompt does not count."""
    return [last for *prefix, last in words if not prefix or output_token_ids[-len(prefix) :] == prefix]
