"""The rows of a stream view without a widget: what they hold, and what a view has yet to see."""

import dataclasses
from collections.abc import Iterable

from llmkernel.notebook.widgets.messages import Counters, Frame, RowSnapshot, Snapshot, TokenView

__all__ = ["StreamRows"]

FEW_ROWS = 12
"""Up to this many rows are taken for visible until a view says which are."""


@dataclasses.dataclass(slots=True)
class _Row:
    id: str
    label: str
    counters: Counters
    text: str = ""
    token_views: list[TokenView] = dataclasses.field(default_factory=list)
    sent_text: int = 0
    sent_views: int = 0

    def snapshot(self) -> RowSnapshot:
        self.sent_text, self.sent_views = len(self.text), len(self.token_views)
        counters = {name: getattr(self.counters, name) for name in Counters.__struct_fields__}
        return RowSnapshot(
            id=self.id, label=self.label, text=self.text, token_views=self.token_views or None, **counters
        )


class StreamRows:
    """Rows that grow, and the numbered frames that bring a view from one state to the next."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        """`rows`: (request id, label) of each."""
        self._rows = [_Row(id, label, Counters(state="queued", tokens=0)) for id, label in rows]
        self._visible: dict[str, set[int]] = {}
        self._changed: dict[int, Counters] = {}
        self._urgent = False
        self._seq = 0

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: int, text: str, token_views: Iterable[TokenView] = ()) -> None:
        """`row` grew by `text`."""
        self._rows[row].text += text
        self._rows[row].token_views.extend(token_views)

    def count(self, row: int, changes: Counters) -> None:
        """Counters of `row` changed. A change of state is urgent: it goes with the next frame of text."""
        told = self._changed.setdefault(row, Counters())
        for name in Counters.__struct_fields__:
            value = getattr(changes, name)
            if value is not None and value != getattr(self._rows[row].counters, name):
                setattr(self._rows[row].counters, name, value)
                setattr(told, name, value)
                self._urgent = self._urgent or name == "state"

    def see(self, view: str, rows: Iterable[int]) -> None:
        """`view` shows these rows now."""
        self._visible[view] = {row for row in rows if 0 <= row < len(self._rows)}

    def forget_views(self) -> None:
        """A view came: all of them say again what they show when they get the snapshot that follows."""
        self._visible.clear()

    def snapshot(self) -> Snapshot:
        """All there is; the next frame counts from here."""
        self._changed.clear()
        self._urgent = False
        return Snapshot(self._seq, [row.snapshot() for row in self._rows])

    def frame(self, *, counters: bool) -> Frame | None:
        """What views have yet to see, or None. `counters`: it is their turn (they also go when a state has changed)."""
        frame = Frame(self._seq + 1)
        for index in self._on_screen():
            row = self._rows[index]
            if row.sent_text < len(row.text):
                frame.d.append((index, row.text[row.sent_text :]))
                row.sent_text = len(row.text)
            if row.sent_views < len(row.token_views):
                frame.k.append((index, row.token_views[row.sent_views :]))
                row.sent_views = len(row.token_views)
        if counters or self._urgent:
            frame.c = [(index, told) for index, told in self._changed.items() if told != Counters()]
            self._changed = {}
            self._urgent = False
        if not (frame.d or frame.k or frame.c):
            return None
        self._seq += 1
        return frame

    def _on_screen(self) -> Iterable[int]:
        if self._visible:
            return sorted(set().union(*self._visible.values()))
        return range(len(self._rows)) if len(self._rows) <= FEW_ROWS else ()
