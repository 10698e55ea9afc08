"""StreamDecoder: the pieces join to the decode of the whole, whatever the ids and the tokenizer."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.llm.stream_decoder import StreamDecoder
from llmkernel.llm.tokenizer import REPLACEMENT, Tokenizer
from tests.llm.tokenizers_on_the_spot import KINDS, tokenizer

every_kind = pytest.mark.parametrize("kind", KINDS)


def _pieces(tok: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tok, prompt, skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in output), decoder.flush()]


@functools.cache
def _not_ascii(tok: Tokenizer) -> list[int]:
    ids = range(tok.vocab_size)
    return [token_id for token_id in ids if not tok.decode([token_id]).isascii()] or list(ids)


def _ids(tok: Tokenizer, chance: random.Random, length: int) -> list[int]:
    """Random ids; sometimes mostly byte tokens or high bytes, where characters come in parts."""
    size = tok.vocab_size
    mood = chance.random()
    if mood < 0.3 and tok.byte_ids:
        pool = [*tok.byte_ids, size - 1, size - 2]
    elif mood < 0.3:
        pool = _not_ascii(tok)
    else:
        return [chance.randrange(size) for _ in range(length)]
    return [chance.choice(pool) for _ in range(length)]


@pytest.mark.row("A-107")
@every_kind
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 60), skip=st.booleans())
def test_pieces_join_to_the_decode_of_all_ids(kind: str, seed: int, length: int, skip: bool) -> None:
    tok = tokenizer(kind)
    output = _ids(tok, random.Random(seed), length)
    assert "".join(_pieces(tok, [], output, skip)) == tok.decode(output, skip_special_tokens=skip)


@every_kind
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), before=st.integers(1, 20), length=st.integers(0, 20), skip=st.booleans())
def test_a_prompt_in_front_neither_leaks_nor_takes(kind: str, seed: int, before: int, length: int, skip: bool) -> None:
    tok = tokenizer(kind)
    chance = random.Random(seed)
    prompt, output = _ids(tok, chance, before), _ids(tok, chance, length)
    prompt_text = tok.decode(prompt, skip_special_tokens=skip)
    whole = tok.decode(prompt + output, skip_special_tokens=skip)
    text = "".join(_pieces(tok, prompt, output, skip))
    if prompt_text and whole.startswith(prompt_text):
        assert text == whole[len(prompt_text) :]
    else:  # the output changes the prompt's last character: it belongs to the output
        assert whole.endswith(text)


@every_kind
def test_no_piece_holds_part_of_a_character(kind: str) -> None:
    tok = tokenizer(kind)
    text = "hello 東京 😀 café don't, naïve 😀😀 end"
    ids = tok.encode(text, add_special_tokens=False)
    pieces = _pieces(tok, [], ids, skip=False)
    whole = tok.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_word_appears_with_its_last_token() -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode("hello 😀", add_special_tokens=False)
    pieces = _pieces(tok, [], ids)
    assert pieces[-1] == "", "nothing was left for the end"
    assert pieces[-2].endswith("😀")


def test_a_leading_space_is_kept_behind_a_prompt_and_dropped_at_the_start_of_a_text() -> None:
    tok = tokenizer("byte_fallback")
    hello = [tok.backend.token_to_id("▁he"), tok.backend.token_to_id("llo")]
    prompt = [tok.backend.token_to_id("a")]
    assert "".join(_pieces(tok, prompt, hello)) == " hello"
    assert "".join(_pieces(tok, [], hello)) == "hello"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_that_the_prompt_leaves_open_is_completed(kind: str) -> None:
    tok = tokenizer(kind)
    spell = (lambda byte: f"<0x{byte:02X}>") if kind == "byte_fallback" else _byte_level_letter
    euro = [tok.backend.token_to_id(spell(byte)) for byte in "€".encode()]
    a = tok.backend.token_to_id("a")
    assert "".join(_pieces(tok, [a, *euro[:2]], [euro[2], a])) == "€a"
    assert "".join(_pieces(tok, [a, *euro[:2]], [a])) == "a", "the prompt's half character is not the output's"


def test_half_a_character_at_the_end_is_delivered_as_replacement() -> None:
    tok = tokenizer("byte_level")
    half = [tok.backend.token_to_id(_byte_level_letter(byte)) for byte in "€".encode()[:2]]
    assert _pieces(tok, [], half) == ["", "", REPLACEMENT]


def test_long_garbage_is_delivered_before_the_end() -> None:
    tok = tokenizer("byte_level")
    garbage = [tok.backend.token_to_id(_byte_level_letter(0x80))] * 500
    pieces = _pieces(tok, [], garbage)
    assert "".join(pieces) == tok.decode(garbage)
    assert max(map(len, pieces)) < 60, "no burst"


def test_long_runs_of_byte_tokens_are_delivered_before_the_end() -> None:
    tok = tokenizer("byte_fallback")
    text = "გამარჯობა" * 20
    ids = [tok.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = _pieces(tok, [], ids)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 30, "no burst"


def test_special_tokens_are_shown_if_asked_for() -> None:
    tok = tokenizer("byte_level")
    ids = [*tok.encode("hello", add_special_tokens=False), tok.backend.token_to_id("<|end|>")]
    assert "".join(_pieces(tok, [], ids, skip=True)) == "hello"
    assert "".join(_pieces(tok, [], ids, skip=False)) == "hello<|end|>"


@every_kind
def test_special_tokens_in_a_row_are_told_without_spaces_if_asked_for(kind: str) -> None:
    tok = tokenizer(kind)
    ends = sorted(tok.special_ids)[:3]
    contents = {token_id: text for text, token_id in tok.special_texts.items()}
    hello = tok.encode("hello", add_special_tokens=False)
    decoder = StreamDecoder(tok, hello, skip_special_tokens=False, spaces_between_special_tokens=False)
    pieces = [*(decoder.push(token_id) for token_id in [*ends, *hello]), decoder.flush()]
    first = "".join(_pieces(tok, hello, ends[:1], skip=False))
    rest = tok.decode([*hello, *ends, *hello], skip_special_tokens=False)
    rest = rest[len(tok.decode([*hello, *ends], skip_special_tokens=False)) :]
    assert "".join(pieces) == first + contents[ends[1]] + contents[ends[2]] + rest
    hidden = StreamDecoder(tok, hello, skip_special_tokens=True, spaces_between_special_tokens=False)
    assert "".join(hidden.push(token_id) for token_id in ends) == ""


def _byte_level_letter(byte: int) -> str:
    """The letter that byte-level BPE writes for a byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))
