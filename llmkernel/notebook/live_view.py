"""LiveView: a generation as a widget while it runs, and as the stored bundle when it has ended."""

import contextvars
import time
import uuid
from typing import TYPE_CHECKING, Any

from llmkernel.notebook.final_bundle import final_bundle, row_label
from llmkernel.notebook.remarks import print_remarks
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.widgets.frame_clock import FrameClock
from llmkernel.notebook.widgets.stop_channel import StopChannel
from llmkernel.notebook.widgets.stream_view import StreamView

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["LiveView"]


class LiveView:
    """Shows `generation` in the cell that makes it; `show_again` in further ones. All become the final bundle.

    It reads the generation at every beat of the clock: what the engine brings between two beats costs nothing here.
    finished: the bundle stands. close: the browser's half is let go. after_load: the cell shows a load first; nothing
    appears before that is over, and nothing at all if it fails in this cell.
    """

    def __init__(
        self, shell: Any, generation: "Generation", stop: StopChannel, clock: FrameClock, *, after_load: bool = False
    ) -> None:
        self._shell = shell
        self._generation = generation
        self._clock = clock
        self.finished = False
        self._has_tokens = generation.options.get("logprobs") is not None
        self._feeds = RowFeed.of(generation)
        names = [
            (feed.request_id, row_label(generation, feed.row, feed.index) if len(self._feeds) > 1 else "")
            for feed in self._feeds
        ]
        self._widget: StreamView | None = StreamView(names, stop, logprobs=self._has_tokens)
        self._widget.on_shown = self._shown
        self._displays: list[tuple[str, contextvars.Context]] = []
        self._unshown: contextvars.Context | None = None
        if generation.done:
            self._rest()
        else:
            clock.add(self)
        if after_load:
            self._unshown = contextvars.copy_context()
        else:
            self.show_again()

    def changed(self) -> None:
        """The next beat sees it."""

    def beat(self, *, counters: bool) -> None:
        widget = self._widget
        if widget is None:
            return
        if not (self._generation.done or self._generation.waits_for_load):
            self._show_now()
        for number, feed in enumerate(self._feeds):
            text, token_views = feed.new()
            if text or token_views:
                widget.append(number, text, token_views)
            if counters or feed.state_changed:
                widget.count(number, feed.counters())
        widget.beat(counters=counters)

    def _shown(self, rows: list[int]) -> None:
        """The first page that shows the first text says when that was."""
        for number in rows:
            stats = self._feeds[number].metrics if 0 <= number < len(self._feeds) else None
            if stats is not None and not stats.way.on_screen:
                stats.way.on_screen = time.monotonic()

    def finish(self) -> None:
        if not self._generation.raises or any(self._generation.texts):
            self._show_now()
        self._rest()
        data, metadata = final_bundle(self._generation)
        for display_id, context in self._displays:
            context.copy().run(self._publish, display_id, data, metadata, update=True)
        self._displays.clear()
        print_remarks(self._generation)
        if self._has_tokens:
            again = f"`%llm show {self._generation.id} --view`"
            print(f"Its tokens and what else stood to choose: {again}, or `.tokens()` of the result.")  # noqa: T201

    def _show_now(self) -> None:
        """What waited for a load comes on screen."""
        context, self._unshown = self._unshown, None
        if context is not None:
            context.run(self.show_again)

    def _rest(self) -> None:
        """Nothing grows any more: the last frame, and what later views start from."""
        self._clock.remove(self)
        self.beat(counters=True)
        if self._widget is not None:
            self._widget.finish()
        self.finished = True

    def show_again(self) -> None:
        """Show the widget in the cell that runs now."""
        if self._widget is None:
            return
        display_id = uuid.uuid4().hex
        data = {"text/plain": "The answer is on its way …"}
        if self.finished:
            data = final_bundle(self._generation)[0]
        else:
            self._displays.append((display_id, contextvars.copy_context()))
        self._publish(display_id, {**data, **self._widget.view_data}, {}, update=False)

    def close(self) -> None:
        """Let the widget go; the handle of the generation, which a notebook keeps in `Out`, keeps nothing of it."""
        self._clock.remove(self)
        self._feeds.clear()
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.close()

    def _publish(self, display_id: str, data: dict[str, Any], metadata: dict[str, Any], *, update: bool) -> None:
        self._shell.display_pub.publish(
            data=data, metadata=metadata, transient={"display_id": display_id}, update=update
        )
