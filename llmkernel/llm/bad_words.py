"""bad_words as the engine needs them: sequences of token ids."""

from collections.abc import Sequence

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.tokenizer import Tokenizer

__all__ = ["MAX_BAD_WORDS", "encode_bad_words"]

MAX_BAD_WORDS = 128
"""Sequences of one request, after tokenising."""


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Each word as it stands at the start of a text, and as it stands after a space, where that is another token."""
    sequences: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(plain)
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words make {len(sequences)} token sequences, and {MAX_BAD_WORDS} are allowed; give fewer words.",
            parameter="bad_words",
        )
    return sequences
