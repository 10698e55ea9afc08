"""Slots against a processor's own view: whatever comes and goes, following the updates gives the right rows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.engine.worker.logits_processors import BatchUpdate, MoveDirectionality
from llmkernel.engine.worker.logits_processors.slots import SlotRequest, Slots
from llmkernel.protocol.sampling_params import SamplingParams

PARAMS = SamplingParams()


def request(key: int) -> SlotRequest:
    return SlotRequest(key, PARAMS, [key], [])


def follow(rows: dict[int, int], update: BatchUpdate) -> None:
    """What a processor does, in the order that the interface promises."""
    assert list(update.removed) == sorted(update.removed, reverse=True)
    for index in update.removed:
        del rows[index]
    for index, params, prompt, _ in update.added:
        assert params is PARAMS and index not in rows
        rows[index] = prompt[0]
    for source, target, direction in update.moved:
        assert direction is MoveDirectionality.UNIDIRECTIONAL and target not in rows
        rows[target] = rows.pop(source)
    assert sorted(rows) == list(range(update.batch_size))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True), min_size=1, max_size=12))
def test_rows_follow_from_the_updates(steps: list[list[int]]) -> None:
    slots, rows = Slots(), {}
    before: set[int] = set()
    for keys in steps:
        update, order = slots.arrange([request(key) for key in keys])
        assert (update is None) == (set(keys) == before)
        if update is not None:
            follow(rows, update)
        assert [keys[position] for position in order] == [rows[index] for index in range(len(keys))]
        before = set(keys)


def test_who_stays_keeps_the_row_where_nobody_leaves() -> None:
    slots = Slots()
    slots.arrange([request(1), request(2)])
    update, order = slots.arrange([request(3), request(2), request(1)])
    assert update is not None and [index for index, *_ in update.added] == [2] and order == [2, 1, 0]
    assert slots.arrange([request(2), request(1), request(3)]) == (None, [1, 0, 2])
