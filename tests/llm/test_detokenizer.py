"""IncrementalDetokenizer and StopStrings against a reference on the whole text."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.llm.detokenizer import IncrementalDetokenizer
from llmkernel.llm.stop_strings import StopStrings
from llmkernel.llm.stream_decoder import StreamDecoder
from tests.llm.tokenizers_on_the_spot import KINDS, tokenizer


def _detokenizer(kind: str, **options: object) -> IncrementalDetokenizer:
    decoder = StreamDecoder(tokenizer(kind), [], skip_special_tokens=True)
    return IncrementalDetokenizer(decoder, **options)  # type: ignore[arg-type]


def _reference(text: str, stops: Sequence[str], include: bool, start: int) -> tuple[str, str | None]:
    """The earliest end wins, then the order of the list; written on the whole text."""
    found = [(at + len(stop), order) for order, stop in enumerate(stops) if (at := text.find(stop, start)) >= 0]
    if not found:
        return text, None
    end, order = min(found)
    stop = stops[order]
    return text[: end if include else end - len(stop)], stop


def _run(
    detokenizer: IncrementalDetokenizer, ids: Sequence[int], chance: random.Random, kind: str
) -> tuple[list[str], str | None]:
    """Feed `ids` in steps of 1 to 4 tokens; what was shown (deltas), and the stop string."""
    shown = []
    at, stop = 0, None
    while at < len(ids) and stop is None:
        step = ids[at : at + chance.choice([1, 1, 1, 2, 4])]
        at += len(step)
        stop = detokenizer.update(step)
        if stop is None and at >= len(ids):
            stop = detokenizer.flush()
        shown.append(detokenizer.next_text(finished=stop is not None or at >= len(ids), delta=True))
    return shown, stop


@pytest.mark.row("A-107", "A-108")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "smollm2"])
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), include=st.booleans(), letters=st.booleans())
def test_stop_strings_equal_a_search_in_the_whole_text(kind: str, seed: int, include: bool, letters: bool) -> None:
    tok, chance = tokenizer(kind), random.Random(seed)
    pool = tok.encode("a b hello éé 東a bb", add_special_tokens=False) if letters else range(tok.vocab_size)
    ids = [chance.choice(pool) for _ in range(chance.randint(1, 30))]
    whole = tok.decode(ids)
    stops = []
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(whole) + 1)
        stops.append(whole[start : start + chance.randint(1, 6)] if chance.random() < 0.7 else "zq")
    stops = [stop for stop in stops if stop] or ["b h"]
    detokenizer = _detokenizer(kind, stop=stops, include_stop_str_in_output=include)
    shown, stop = _run(detokenizer, ids, chance, kind)
    expected_text, expected_stop = _reference(whole, stops, include, 0)
    assert (detokenizer.output_text, stop) == (expected_text, expected_stop)
    assert "".join(shown) == expected_text
    assert tok.decode(detokenizer.token_ids).startswith(expected_text), "ids and text are in step"


def test_nothing_of_a_stop_string_is_shown_before_it_is_found_and_all_of_it_if_it_is_not() -> None:
    tok = tokenizer("byte_level")
    detokenizer = _detokenizer("byte_level", stop=["\n\nUser:"])
    shown = ""
    for token_id in tok.encode("hello\n\nUse it. \n\nUser", add_special_tokens=False):
        assert detokenizer.update([token_id]) is None
        shown += detokenizer.next_text(finished=False, delta=True)
        assert not shown.endswith("\n")
    assert shown == "hello\n\nUse it. "
    assert detokenizer.next_text(finished=True, delta=True) == "\n\nUser"


def test_tokens_after_the_one_that_completes_a_stop_string_are_dropped() -> None:
    tok = tokenizer("byte_level")
    first, rest = tok.encode("a b", add_special_tokens=False), tok.encode(" c d e", add_special_tokens=False)
    detokenizer = _detokenizer("byte_level", stop=[" b"])
    assert detokenizer.update([*first, *rest]) == " b"
    assert detokenizer.output_text == "a"
    assert detokenizer.token_ids == first


def test_min_tokens_moves_the_start_of_the_search() -> None:
    tok = tokenizer("byte_level")
    ids = [tok.backend.token_to_id(letter) for letter in "abab"]
    detokenizer = _detokenizer("byte_level", stop=["b"], min_tokens=2)
    assert [detokenizer.update([token_id]) for token_id in ids] == [None, None, None, "b"]
    assert detokenizer.output_text == "aba"


def test_the_text_of_a_stop_token_is_left_out_unless_it_is_asked_for() -> None:
    tok = tokenizer("byte_level")
    ids = [tok.backend.token_to_id(letter) for letter in "ab"]
    for include, text in ((False, "a"), (True, "ab")):
        detokenizer = _detokenizer("byte_level", include_stop_str_in_output=include)
        assert detokenizer.update(ids, stop_terminated=True) is None
        assert (detokenizer.output_text, detokenizer.token_ids) == (text, ids)


def test_earliest_end_wins_and_the_order_of_the_list_decides_ties() -> None:
    stops = StopStrings(["cd", "bcd", "b"])
    match = stops.find("abcde", 0, 0)
    assert match is not None and match.stop == "b"
    match = StopStrings(["bcd", "cd"]).find("abcde", 0, 0)
    assert match is not None and (match.stop, match.start) == ("bcd", 1)


def test_without_a_tokenizer_ids_are_kept_and_the_text_is_empty() -> None:
    detokenizer = IncrementalDetokenizer(None)
    assert detokenizer.update([1, 2, 3]) is None
    assert detokenizer.flush() is None
    assert (detokenizer.token_ids, detokenizer.next_text(finished=True, delta=False)) == ([1, 2, 3], "")
