"""LoopEnd: to hear of a loop that is closed over its tasks, without their being cancelled."""

import asyncio
import contextvars
import weakref
from collections.abc import Callable

__all__ = ["LoopEnd"]

_NEVER = 1e9
"""Seconds: longer than any loop turns."""


class LoopEnd:
    """While in `with`, calls `tell` in the thread that closes the running loop.

    asyncio.run cancels what runs before it closes its loop; loop.close() alone tells nobody. But it drops the loop's
    timers, and with them what this one holds.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        held = _Held()
        self._finalizer = weakref.finalize(held, tell)
        self._finalizer.atexit = False
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_NEVER, _nothing, held, context=contextvars.Context())
        self._timer = weakref.ref(timer)  # only the loop may hold it

    def __enter__(self) -> "LoopEnd":
        return self

    def __exit__(self, *_: object) -> None:
        self._finalizer.detach()
        if (timer := self._timer()) is not None:
            timer.cancel()


class _Held:
    pass


def _nothing(_: _Held) -> None:
    pass
