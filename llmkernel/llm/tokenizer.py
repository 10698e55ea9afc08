"""Tokenizer: between text and token ids, with `tokenizers` alone (design D12)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from llmkernel.errors import UnsupportedFeatureError
from llmkernel.protocol.handshake import TokenizerFacts

__all__ = ["REPLACEMENT", "Tokenizer"]

REPLACEMENT = "\ufffd"
"""What a decoder puts where bytes are no UTF-8 (yet)."""


class Tokenizer:
    """The tokenizer of the loaded model. Safe to use from several threads at once.

    backend: the tokenizers.Tokenizer. special_ids: ids that skip_special_tokens leaves out of the text.
    byte_ids: ids of the byte tokens "<0x00>" to "<0xFF>", where the decoder joins runs of them (SentencePiece's byte
    fallback); empty for every other kind of tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self.backend = backend
        self.facts = facts
        self.bos_token_id = facts.bos_token_id
        self.eos_token_id = facts.eos_token_id
        self.chat_template = facts.chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = {token.content: token_id for token_id, token in added.items() if token.special}
        self.byte_ids = _byte_fallback_ids(backend)
        self._anchor = self._find_anchor()
        self._byte_letters = _byte_letters() if _has_decoder(backend, "ByteLevel") else {}
        self._added = frozenset(added)
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_facts(cls, facts: TokenizerFacts) -> "Tokenizer":
        """Build it from what the engine told; takes 0.1 s and more for large vocabularies, so do it in a thread."""
        if facts.json is None and facts.path is None:
            raise UnsupportedFeatureError(
                "The model comes without a tokenizer that the `tokenizers` library can read; send token ids, or load a"
                " model with a tokenizer.json.",
                parameter="tokenizer",
            )
        text = facts.json if facts.json is not None else Path(str(facts.path)).read_text("utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()  # a tokenizer.json may carry the lengths it was trained with
        backend.no_padding()
        return cls(backend, facts)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. A BOS that the text spells out is not doubled by the one that encoding adds."""
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text: leading space kept, special tokens shown, U+FFFD for part of a
        character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.text_after(self._anchor, [token_id])
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token as it stands inside a text, in UTF-8: also where it is part of a character."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = self._spelled(token_id)
        return data

    def _spelled(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is not None and token_id in self.byte_ids:
            return bytes([int(piece[3:5], 16)])
        if piece is not None and token_id not in self._added and self._byte_letters:
            spelled = [self._byte_letters.get(letter) for letter in piece]
            if None not in spelled:
                return bytes(spelled)  # type: ignore[arg-type]
        return self.token_text(token_id).encode()

    def text_after(self, context: Sequence[int], token_ids: Sequence[int]) -> str:
        """What `token_ids` add to the text of `context`, special tokens shown."""
        before = self.backend.decode(context, skip_special_tokens=False)
        whole = self.backend.decode([*context, *token_ids], skip_special_tokens=False)
        common = 0
        for left, right in zip(before, whole, strict=False):
            if left != right:
                break
            common += 1
        return whole[common:]

    def _find_anchor(self) -> list[int]:
        """An ordinary token to stand before another, so that the other does not count as the start of a text."""
        for text in ("a", ".", "the"):
            ids = self.backend.encode(text, add_special_tokens=False).ids[-1:]
            if ids and ids[0] not in self.special_ids and self.backend.decode(ids).strip():
                return list(ids)
        return []


def _has_decoder(backend: tokenizers.Tokenizer, kind: str) -> bool:
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    return any(part.get("type") == kind for part in description.get("decoders", [description]))


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printing ones for themselves, others from 256 on
    (GPT-2's table)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if not _has_decoder(backend, "ByteFallback"):
        return frozenset()
    found = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in found if token_id is not None)
