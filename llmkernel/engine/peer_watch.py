"""PeerWatch: whose processes the control thread watches, to detach clients that vanished."""

from collections.abc import Mapping
from typing import Any

import zmq

from llmkernel.protocol.process_handle import ProcessHandle

__all__ = ["PeerWatch"]

POLL_MS = 500
"""How often to look at processes where the system cannot tell of their end."""


class PeerWatch:
    """client_index -> the process of that client. Belongs to one thread."""

    def __init__(self) -> None:
        self._handles: dict[int, ProcessHandle] = {}

    @property
    def poll_ms(self) -> int | None:
        """How long a poll may take at most; None = the poller hears of every end."""
        return POLL_MS if any(handle.descriptor is None for handle in self._handles.values()) else None

    def add(self, client_index: int, pid: int, poller: zmq.Poller) -> None:
        """ProcessLookupError if there is no process `pid`."""
        if client_index in self._handles:
            return
        handle = self._handles[client_index] = ProcessHandle(pid)
        if handle.descriptor is not None:
            poller.register(handle.descriptor, zmq.POLLIN)

    def discard(self, client_index: int, poller: zmq.Poller) -> None:
        handle = self._handles.pop(client_index, None)
        if handle is not None:
            if handle.descriptor is not None:
                poller.unregister(handle.descriptor)
            handle.close()

    def gone(self, ready: Mapping[Any, int]) -> list[int]:
        """Clients whose process has ended; `ready`: what the poller found."""
        return [
            client_index
            for client_index, handle in self._handles.items()
            if (handle.descriptor in ready if handle.descriptor is not None else handle.ended)
        ]

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
