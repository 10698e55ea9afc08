"""Hard masks and biases. Biases come first; a mask comes last, so that nothing can bring a forbidden token back."""

import numpy as np
import torch

__all__ = ["add_bias", "banned_by_bad_words", "forbid", "keep_only"]


def add_bias(rows: torch.Tensor, biases: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """Add to float32 `rows` in place. biases: (row, distinct token ids, what to add to each)."""
    index = np.concatenate([ids + row * rows.shape[1] for row, ids, _ in biases])
    values = np.concatenate([added for _, _, added in biases])
    where = torch.from_numpy(index).to(rows.device)
    flat = rows.view(-1)
    flat[where] += torch.from_numpy(values).to(rows.device)


def keep_only(rows: torch.Tensor, row: int, allowed: torch.Tensor) -> None:
    """-inf for every token of `row` but the `allowed` ids."""
    kept = rows[row, allowed]
    rows[row].fill_(-torch.inf)
    rows[row, allowed] = kept


def forbid(rows: torch.Tensor, banned: list[tuple[int, list[int]]]) -> None:
    """-inf for the token ids of each (row, token ids)."""
    index = [row * rows.shape[1] + token for row, tokens in banned for token in tokens]
    rows.view(-1)[torch.tensor(index, dtype=torch.int64, device=rows.device)] = -torch.inf


def banned_by_bad_words(words: list[list[int]], output_token_ids: list[int]) -> list[int]:
    """The tokens that would complete one of `words`: its other ids are the tail of the output. The prompt is not looked at."""
    banned = []
    for *prefix, last in words:
        if not prefix or output_token_ids[-len(prefix) :] == prefix:
            banned.append(last)
    return banned
