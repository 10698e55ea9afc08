"""What ZMQ may still read: memory that was sent without a copy, and how to know when it is free again."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import zmq

from llmkernel.protocol.serial import Buffer

__all__ = ["PendingMessages", "Tracker", "track_frames"]


class Tracker(Protocol):
    """Tells whether ZMQ has let go of some memory (zmq.MessageTracker)."""

    @property
    def done(self) -> bool: ...


def track_frames(buffers: Iterable[Buffer]) -> tuple[list[zmq.Frame], zmq.MessageTracker]:
    """Frames for `send_multipart(frames, copy=False)`, and a tracker that is done when ZMQ has let go of all of them.

    Drop the list once it is sent: its frames hold their memory too.

    The tracker that `send_multipart(track=True)` returns speaks of the last frame only, while a reused `encode_into`
    buffer is the first one; and pyzmq would let such a buffer be resized while it is queued. Frames below
    zmq.COPY_THRESHOLD bytes are copied at once and hold nothing up.
    """
    frames = [zmq.Frame(buffer, track=True) for buffer in buffers]
    return frames, zmq.MessageTracker(*(frame.tracker for frame in frames))


class PendingMessages:
    """Objects that must stay alive and unchanged while ZMQ may read their memory, in the order in which they were sent.

    Not thread safe: it belongs to the thread or loop that owns the socket.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Tracker, tuple[Any, ...]]] = deque()

    def add(self, tracker: Tracker, *objects: Any) -> None:
        """Keep `objects` until `tracker` is done."""
        self._pending.append((tracker, objects))

    def reclaim(self) -> list[tuple[Any, ...]]:
        """The objects of every message that is done, oldest first; they are forgotten here.

        A message that waits does not hold back younger ones: they may have gone to another peer.
        """
        if not self._pending:
            return []
        finished: list[tuple[Any, ...]] = []
        waiting: deque[tuple[Tracker, tuple[Any, ...]]] = deque()
        for tracker, objects in self._pending:
            if tracker.done:
                finished.append(objects)
            else:
                waiting.append((tracker, objects))
        self._pending = waiting
        return finished

    def __len__(self) -> int:
        return len(self._pending)
