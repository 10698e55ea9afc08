"""DashboardView: the widget of a dashboard; extension/src/dashboard is its browser half."""

from collections.abc import Callable, Sequence
from typing import Any

from llmkernel.notebook.widgets.live_widget import LiveWidget, bundle
from llmkernel.notebook.widgets.messages import (
    DashboardFrame,
    DashboardSnapshot,
    DashboardUp,
    EngineSample,
    Hello,
    Hop,
    RequestRow,
    Resync,
    Trace,
    TraceRequest,
    pack,
    unpack,
)
from llmkernel.notebook.widgets.stop_channel import StopChannel

__all__ = ["DashboardView"]


class DashboardView(LiveWidget):
    """Sends samples as they come, and everything to a view that mounts late or missed one.

    everything: (engine state, samples, rows, log) as they stand. way: the hops of a request, [] if it is not known.
    """

    _esm = bundle("dashboard.js")
    _css = bundle("dashboard.css")

    def __init__(
        self,
        model: str,
        stop: StopChannel,
        everything: Callable[[], tuple[str, Sequence[EngineSample], list[RequestRow], list[str]]],
        way: Callable[[str], list[Hop]],
    ) -> None:
        super().__init__(stop)
        self._model = model
        self._everything = everything
        self._way = way
        self._seq = 0
        self.on_msg(self._receive)

    def add(self, state: str, sample: EngineSample, rows: list[RequestRow], log: list[str]) -> None:
        """One sample, and the rows that changed since the last."""
        self._seq += 1
        self.send(pack(DashboardFrame(self._seq, self._model, state, sample, rows, log)))

    def _receive(self, _widget: object, content: Any, _buffers: object) -> None:
        match unpack(content, DashboardUp):
            case Hello() | Resync():
                state, samples, rows, log = self._everything()
                self.send(pack(DashboardSnapshot(self._seq, self._model, state, list(samples), rows, log)))
            case TraceRequest(id=id):
                if hops := self._way(id):
                    self.send(pack(Trace(id, hops)))
