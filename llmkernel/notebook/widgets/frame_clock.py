"""FrameClock: the beat at which live views are sent what is new."""

import asyncio
from typing import Protocol

__all__ = ["FrameClock"]

FRAME = 0.04
COUNTERS_EVERY = 6
"""Frames between counters: about 4 times a second."""
FEW_VIEWS = 2
"""More live views than this share the beat, so that a kernel stays below 100 messages a second."""


class Beating(Protocol):
    """A view that wants the beat until it is done."""

    def beat(self, *, counters: bool) -> None:
        """Send what is new."""


class FrameClock:
    """One task for all live views of a kernel; it runs only while there are any."""

    def __init__(self) -> None:
        self._views: set[Beating] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, view: Beating) -> None:
        """Call from the loop that the beat shall run on."""
        self._views.add(view)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="llmkernel-frames")

    def remove(self, view: Beating) -> None:
        self._views.discard(view)

    async def _run(self) -> None:
        beats = 0
        while self._views:
            await asyncio.sleep(FRAME * max(1, len(self._views) / FEW_VIEWS))
            beats += 1
            for view in list(self._views):
                view.beat(counters=beats % COUNTERS_EVERY == 0)
