"""StreamView: the live view of one cell's requests."""

import asyncio
import contextvars
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import traitlets

from llmkernel.notebook.widgets.live_widget import LiveWidget, bundle
from llmkernel.notebook.widgets.messages import (
    Counters,
    Hello,
    Part,
    Resync,
    Shown,
    StreamUp,
    TokenView,
    Visible,
    Want,
    pack,
    unpack,
)
from llmkernel.notebook.widgets.stop_channel import StopChannel
from llmkernel.notebook.widgets.stream_rows import StreamRows

__all__ = ["StreamView"]

_STATIC = pathlib.Path(__file__).parent.parent / "static"


class StreamView(LiveWidget):
    """One widget model per cell; extension/src/stream is its browser half, extension/src/model.ts the contract.

    Make it on the kernel's loop and use it there. Call `append` and `count` as answers grow, `beat` to have that sent,
    `finish` once. What a browser says is heard on the loop too, whatever thread it came in on. on_shown(rows): called
    with rows whose first text is on a page's screen.
    """

    _esm = bundle("stream.js")
    _css = bundle("stream.css")
    snapshot = traitlets.Any(None, allow_none=True).tag(sync=True)
    logprobs = traitlets.Bool(False).tag(sync=True)

    def __init__(self, rows: Iterable[tuple[str, str]], stop: StopChannel, *, logprobs: bool = False) -> None:
        """`rows`: (request id, label) of each request."""
        super().__init__(stop, logprobs=logprobs)
        self.on_shown: Callable[[list[int]], None] = lambda _rows: None
        self._rows = StreamRows(rows)
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.on_msg(self._receive)

    def append(self, row: int, text: str, token_views: Iterable[TokenView] = ()) -> None:
        self._rows.append(row, text, token_views)

    def count(self, row: int, changes: Counters) -> None:
        self._rows.count(row, changes)

    def beat(self, *, counters: bool) -> None:
        """Send what is new."""
        if (frame := self._rows.frame(counters=counters)) is not None:
            self.send(pack(frame))

    def finish(self) -> None:
        """Everything has ended: the last frame, and the snapshot that a later view starts from."""
        self.beat(counters=True)
        self.snapshot = pack(self._rows.snapshot())

    def _receive(self, _widget: object, content: Any, _buffers: object) -> None:
        self._loop.call_soon_threadsafe(self._answer, content, context=self._context)

    def _answer(self, content: Any) -> None:
        match unpack(content, StreamUp):
            case Hello():
                self._rows.forget_views()
                self.send(pack(self._rows.snapshot()))
            case Resync():
                self.send(pack(self._rows.snapshot()))
            case Visible(view=view, rows=rows):
                self._rows.see(view, rows)
            case Shown(rows=rows):
                self.on_shown(rows)
            case Want(part="markdown"):
                self.send(pack(Part("markdown", (_STATIC / "markdown.js").read_text("utf-8"))))
