"""LiveOutput: one output of a cell that is updated in place, at most ten times a second."""

import asyncio
import contextvars
import time
import uuid
from collections.abc import Callable
from typing import Any

__all__ = ["LiveOutput"]

INTERVAL = 0.1
"""Seconds between two updates."""
BYTES_PER_SECOND = 500_000
"""Large outputs are sent less often, so that this is kept."""

Render = Callable[[], tuple[dict[str, Any], dict[str, Any]]]


class LiveOutput:
    """render: makes (data, metadata) of the moment; it is called when an update is due, not for each change.

    Nothing appears before the first `changed` or `finish`; shown: it has. Use it on the loop; the output belongs to the
    cell that makes it.
    """

    def __init__(self, shell: Any, render: Render) -> None:
        self._shell = shell
        self._render = render
        self._display_id = uuid.uuid4().hex
        self.shown = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.copy_context()  # output belongs to the cell that made this, whoever updates it

    def changed(self) -> None:
        """Show it as it is now, or soon."""
        if self._timer is None:
            delay = max(0.0, self._due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._update, context=self._context)

    def finish(self) -> None:
        """The last update, at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._context.copy().run(self._update)  # a copy: this may be called from within it

    def _update(self) -> None:
        self._timer = None
        started = time.monotonic()
        data, metadata = self._render()
        transient = {"display_id": self._display_id}
        self._shell.display_pub.publish(data=data, metadata=metadata, transient=transient, update=self.shown)
        self.shown = True
        size = sum(len(value) for value in data.values())
        spent = time.monotonic() - started
        self._due = started + max(INTERVAL, size / BYTES_PER_SECOND, 5 * spent)
