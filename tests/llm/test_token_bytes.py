"""Tokenizer.token_bytes: bytes join to the text, also where tokens are parts of characters."""

import pytest

from llmkernel.llm.tokenizer import REPLACEMENT
from tests.llm.tokenizers_on_the_spot import KINDS, tokenizer

TEXT = "hello 東京 😀 café don't"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_text_join_to_it(kind: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(TEXT, add_special_tokens=False)
    joined = b"".join(tok.token_bytes(token_id) for token_id in ids).decode()
    assert joined.lstrip() == tok.decode(ids).lstrip()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace_byte_fallback"])
def test_parts_of_characters_have_their_bytes(kind: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode("€", add_special_tokens=False)[-3:]
    assert [tok.token_bytes(token_id) for token_id in ids] == [b"\xe2", b"\x82", b"\xac"]
    assert all(REPLACEMENT in tok.token_text(token_id) for token_id in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_those_of_their_name(kind: str) -> None:
    tok = tokenizer(kind)
    text, token_id = next(iter(tok.special_texts.items()))
    assert tok.token_bytes(token_id).strip() == text.encode()
