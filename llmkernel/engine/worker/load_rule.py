"""LoadRule: threads = what is available less what others take, read from the system's counters."""

import dataclasses
import math

from llmkernel.engine.worker.cpu_share import CpuShare
from llmkernel.engine.worker.other_load import OtherLoad

__all__ = ["LoadRule", "ThreadRoom", "next_room"]

WINDOW = 0.1
"""Seconds between two reads: the kernel's clock ticks every hundredth."""

STALE = 1.0
"""Seconds after which what others took is no word on what they take now: the engine was idle. All threads begin then:
a prompt is one long step, and to read it with half of them costs more than a wrong guess does.
"""

TAKE_BACK, GIVE = 0.4, 0.25
"""The part of a processor that others may take from a thread which runs already, and from one more: cpu.md section 5.

A thread too many costs more (all wait for the one that does not run) than one too few.
"""


@dataclasses.dataclass(frozen=True)
class ThreadRoom:
    """threads: to use now. room: threads that there was room for in the last window, never fewer."""

    threads: int
    room: int


def next_room(before: ThreadRoom, *, available: float, other: float, most: int) -> ThreadRoom:
    """clamp(available - other, 1, most), fewer at once, more only after two windows in a row that have the room.

    available, other: processors' worth of time; most: threads.
    """
    kept = _whole(available - other + TAKE_BACK, most)
    if kept < before.threads:
        return ThreadRoom(kept, kept)
    room = max(before.threads, _whole(available - other + GIVE, most))
    return ThreadRoom(min(before.room, room), room)


class LoadRule:
    """A thread rule: the number for the coming step, looked up again every WINDOW."""

    def __init__(self, share: CpuShare, load: OtherLoad, now: float) -> None:
        self._share = share
        self._load = load
        self._room = ThreadRoom(share.most_threads, share.most_threads)
        self._read_at = now

    def threads(self, now: float) -> int:
        """now: seconds of time.monotonic()."""
        age = now - self._read_at
        if age >= WINDOW:
            self._read_at = now
            other = self._load.read()
            share = self._share
            if age >= STALE:
                self._room = ThreadRoom(share.most_threads, share.most_threads)
            elif other is not None:
                self._room = next_room(self._room, available=share.available, other=other, most=share.most_threads)
        return self._room.threads

    def took(self, threads: int, tokens: int, seconds: float) -> None:
        """Step times say nothing here."""


def _whole(room: float, most: int) -> int:
    return max(1, min(most, math.floor(room)))
