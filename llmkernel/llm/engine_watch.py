"""EngineWatch: is the engine slow, or stuck? It asks only while somebody waits and nothing is heard (design D4)."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from llmkernel.client.background_task import background_task
from llmkernel.client.control_client import STUCK_AFTER, EngineStuckError
from llmkernel.errors import EngineDeadError
from llmkernel.logger import init_logger
from llmkernel.protocol.control import Pong

__all__ = ["EngineHealth", "EngineWatch"]

logger = init_logger(__name__)

QUIET = 0.5
"""Seconds without a word from the engine, while somebody waits, after which it is asked."""

INTERVAL = 2.0
"""Seconds between two questions to an engine that answers them, and brings nothing."""

SLOW_STEP = 1.0
"""Seconds that a step may take before it is spoken of."""

_LEAST_WAIT = 3.0
_LATE = 0.25


@dataclass(frozen=True)
class EngineHealth:
    """state: "ok", "slow" (its step has run for `seconds`) or "stuck" (it has not answered for `seconds`).

    A slow engine is no error. The streams of a stuck one can be stopped; it may come back, or has to be ended.
    """

    state: Literal["ok", "slow", "stuck"] = "ok"
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.state == "stuck":
            return f"stuck: no answer for {self.seconds:.0f} s"
        return f"step running for {self.seconds:.0f} s" if self.state == "slow" else "ok"


class EngineWatch:
    """Asks the engine of one loop how it is. No task runs, and nothing wakes up, unless somebody waits.

    ping: asks over the control channel, with a time limit. waits: whether somebody waits for the engine. listeners:
    called with the EngineHealth when the state changes. `heard` is to be called at every sign of life.
    """

    def __init__(self, ping: Callable[[float], Awaitable[Pong]], waits: Callable[[], bool]) -> None:
        self.listeners: list[Callable[[EngineHealth], None]] = []
        self._ping = ping
        self._waits = waits
        self._task: asyncio.Task[None] | None = None
        self._last_heard = 0.0
        self._state: Literal["ok", "slow", "stuck"] = "ok"
        self._since = 0.0

    @property
    def health(self) -> EngineHealth:
        """As far as it is known now."""
        return EngineHealth(self._state, 0.0 if self._state == "ok" else time.monotonic() - self._since)

    def heard(self) -> None:
        """The engine has sent something."""
        self._last_heard = time.monotonic()
        if self._state != "ok":
            self._change("ok")

    def somebody_waits(self) -> None:
        """Watch until nobody waits any more. Call it on the loop."""
        if self._task is None or self._task.done():
            self.heard()
            self._task = background_task(self.watch(), "llmkernel-engine-watch")

    def close(self) -> None:
        """Stop watching, until somebody waits again. On the loop."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def watch(self) -> None:
        """Ask whenever nothing has been heard for QUIET seconds; ends when nobody waits."""
        try:
            while self._waits():
                silent = time.monotonic() - self._last_heard
                if silent < QUIET:
                    await asyncio.sleep(QUIET - silent)
                else:
                    await self._ask(max(STUCK_AFTER - silent, _LEAST_WAIT) if self._state != "stuck" else STUCK_AFTER)
        except EngineDeadError:
            pass  # others tell of that
        finally:
            if self._state != "ok":
                self._change("ok")

    async def _ask(self, timeout: float) -> None:  # noqa: ASYNC109 - the ping minds it
        asked = time.monotonic()
        try:
            pong = await self._ping(timeout)
        except EngineStuckError:
            on_time = time.monotonic() - asked < timeout + _LATE  # else this loop stood still: that says nothing
            if on_time and self._waits():  # the engine may have ended meanwhile, and everybody has heard of it
                self._change("stuck", self._last_heard)
            return
        self._last_heard = time.monotonic()
        if pong.step_age >= SLOW_STEP:
            self._change("slow", self._last_heard - pong.step_age)
        elif self._state != "ok":
            self._change("ok")
        await asyncio.sleep(INTERVAL)

    def _change(self, state: Literal["ok", "slow", "stuck"], since: float = 0.0) -> None:
        changed, self._state = state != self._state, state
        self._since = since
        if not changed:
            return
        if state == "stuck":
            logger.warning(
                "The engine is %s. Whoever waits can be interrupted; llmkernel stop ends the engine.", self.health
            )
        for listener in list(self.listeners):
            try:
                listener(self.health)
            except Exception:  # a display must not end the watch
                logger.exception("A listener to the engine's health failed.")
