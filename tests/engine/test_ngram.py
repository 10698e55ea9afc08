"""Prompt lookup and the pace of drafts: pure functions, in numbers."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkernel.engine.speculative.draft_pace import DraftPace
from llmkernel.engine.speculative.drafting import Drafting
from llmkernel.engine.speculative.ngram import find_drafts
from llmkernel.speculative_config import SpeculativeConfig


def by_hand(token_ids: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """What find_drafts should find, written out."""
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        end = token_ids[-length:]
        for start in range(len(token_ids) - length):
            if token_ids[start : start + length] == end:
                return token_ids[start + length : start + length + count]
    return []


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    count=st.integers(0, 6),
    longest=st.integers(1, 5),
    shortest=st.integers(1, 5),
)
def test_the_longest_end_that_came_before_and_its_first_place(
    token_ids: list[int], count: int, longest: int, shortest: int
) -> None:
    shortest = min(longest, shortest)
    found = find_drafts(np.array(token_ids, np.int32), count, longest=longest, shortest=shortest)
    assert found == (by_hand(token_ids, count, longest, shortest) if count else [])


def test_it_takes_microseconds() -> None:
    """Below 50 us for 4,000 tokens on a quiet machine; 1 ms here, where ten times as slow is no fault of its own."""
    dice = np.random.default_rng(1)
    for kinds in (1, 3, 50_000):
        token_ids = dice.integers(0, kinds, 4_000).astype(np.int32)
        started = time.perf_counter()
        for _ in range(20):
            find_drafts(token_ids, 5, longest=4, shortest=2)
        assert (time.perf_counter() - started) / 20 < 1e-3


@given(parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=90), min_size=1, max_size=6))
def test_a_text_that_grows_is_looked_up_as_a_whole(parts: list[list[int]]) -> None:
    drafting = Drafting(SpeculativeConfig(num_speculative_tokens=1))
    token_ids: list[int] = []
    for part in parts:
        token_ids += part
        assert drafting.propose(token_ids, 9) == by_hand(token_ids, 1, 5, 2)
        assert drafting.propose(token_ids, 0) == []


def test_accepted_drafts_become_more_and_rejected_ones_fewer() -> None:
    pace = DraftPace(8)
    limits = [pace.limit(10)]
    for position in range(3):
        pace.record(pace.limit(position), pace.limit(position), position)
        limits.append(pace.limit(position))
    assert limits == [4, 8, 8, 8]
    for accepted in (3, 2, 2, 2):
        pace.record(pace.limit(0), accepted, 0)
    assert pace.limit(0) == 2


def test_a_request_whose_drafts_are_never_accepted_is_left_alone_more_and_more() -> None:
    pace = DraftPace(5)
    tried = []
    for position in range(1, 1_001):
        if limit := pace.limit(position):
            tried.append((position, limit))
            pace.record(limit, 0, position)
    assert len(tried) < 40 and sum(limit for _, limit in tried) < 45
    gaps = [later[0] - sooner[0] for sooner, later in itertools.pairwise(tried)]
    assert gaps[-10:] == [32] * 10
    again = tried[-1][0] + 32
    assert pace.limit(again - 1) == 0 and pace.limit(again) == 1
    pace.record(1, 1, again + 2)
    assert pace.limit(again + 2) == 2, "one success, and it goes on at once"


@pytest.mark.parametrize("most", [1, 2, 128])
def test_never_more_than_asked_for(most: int) -> None:
    pace = DraftPace(most)
    for _ in range(12):
        assert 1 <= pace.limit(0) <= most
        pace.record(pace.limit(0), pace.limit(0), 0)
    assert pace.limit(0) == most
