"""RequestWay: when one request passed the hops between the cell and the screen (systems.md A-147)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmkernel.protocol.outputs import EngineCoreEvent

__all__ = ["MOST_EVENTS", "RequestWay"]

MOST_EVENTS = 256
"""Events of the engine that are kept of one request: one that is preempted over and over has no end of them."""


@dataclass(slots=True)
class RequestWay:
    """Moments of one request, a handful for each, none per token. Seconds; 0.0 = did not happen (yet).

    This process's time.monotonic(): submitted (its arrival), sent (ADD is out), received and decoded (the first token),
    on_screen (a page has shown the first text, as it told us), ended. The engine's: events, and pushed (the first
    token). clock_offset: to be added to the engine's times to have this process's.
    """

    submitted: float = 0.0
    sent: float = 0.0
    pushed: float = 0.0
    received: float = 0.0
    decoded: float = 0.0
    on_screen: float = 0.0
    ended: float = 0.0
    clock_offset: float = 0.0
    events: list[EngineCoreEvent] = field(default_factory=list)

    @classmethod
    def since(cls, arrival_time: float) -> "RequestWay":
        """Of a request that arrived at `arrival_time` of the wall clock, a moment ago."""
        return cls(time.monotonic() - max(time.time() - arrival_time, 0.0))

    def take(self, events: Sequence[EngineCoreEvent]) -> None:
        """The engine tells of these."""
        self.events += events[: MOST_EVENTS - len(self.events)]
