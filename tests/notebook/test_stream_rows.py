"""StreamRows: whatever a view saw and missed, it ends up with the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from llmkernel.notebook.widgets.messages import Counters, Frame
from llmkernel.notebook.widgets.stream_rows import FEW_ROWS, StreamRows


class View:
    """What the browser does with the messages, in Python."""

    def __init__(self, rows: StreamRows) -> None:
        self.resync(rows)

    def resync(self, rows: StreamRows) -> None:
        snapshot = rows.snapshot()
        self.seq, self.texts = snapshot.seq, [row.text for row in snapshot.rows]

    def apply(self, frame: Frame | None) -> None:
        if frame is None:
            return
        assert frame.seq == self.seq + 1
        self.seq = frame.seq
        for row, text in frame.d:
            self.texts[row] += text


def make(count: int) -> StreamRows:
    return StreamRows((f"r{row}", "") for row in range(count))


def test_rows_off_screen_get_no_text_until_they_are_seen() -> None:
    rows = make(FEW_ROWS + 1)
    view = View(rows)
    rows.see("v", [0])
    rows.append(0, "near")
    rows.append(5, "far")
    view.apply(rows.frame(counters=False))
    assert (view.texts[0], view.texts[5]) == ("near", "")
    rows.see("v", [5])
    view.apply(rows.frame(counters=False))
    assert view.texts[5] == "far"


def test_counters_wait_for_their_turn_but_a_new_state_does_not() -> None:
    rows = make(1)
    rows.snapshot()
    rows.count(0, Counters(tokens=3))
    assert rows.frame(counters=False) is None
    rows.count(0, Counters(state="decoding"))
    frame = rows.frame(counters=False)
    assert frame is not None and frame.c == [(0, Counters(state="decoding", tokens=3))]
    assert rows.frame(counters=True) is None


def test_what_did_not_change_is_not_sent() -> None:
    rows = make(1)
    rows.count(0, Counters(tokens=3))
    rows.frame(counters=True)
    rows.count(0, Counters(tokens=3))
    assert rows.frame(counters=True) is None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 19), st.text(max_size=4)),
        st.tuples(st.just("see"), st.sets(st.integers(0, 19)), st.just("")),
        st.tuples(st.just("frame"), st.just(0), st.just("")),
        st.tuples(st.just("resync"), st.just(0), st.just("")),
    ),
    max_size=60,
)


@given(steps)
def test_nothing_is_lost(steps: list[tuple[str, object, str]]) -> None:
    rows, written = make(20), [""] * 20
    view = View(rows)
    for step, target, text in steps:
        if step == "append":
            assert isinstance(target, int)
            rows.append(target, text)
            written[target] += text
        elif step == "see":
            assert isinstance(target, set)
            rows.see("v", target)
        elif step == "frame":
            view.apply(rows.frame(counters=True))
        else:
            view.resync(rows)
    rows.see("v", range(20))
    view.apply(rows.frame(counters=True))
    assert view.texts == written
