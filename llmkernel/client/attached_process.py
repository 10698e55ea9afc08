"""AttachedProcess: the process of an engine that somebody else started. We see its end, and never cause it."""

import select
import socket
import threading
from pathlib import Path

from llmkernel.client.watched_process import WatchedProcess
from llmkernel.protocol.process_handle import ProcessHandle

__all__ = ["AttachedProcess"]

POLL_SECONDS = 0.5
"""How often to look where the system cannot tell of a process's end."""


class AttachedProcess(WatchedProcess):
    """Watches the process `pid` until it ends or `shutdown` ends the watch. ProcessLookupError if there is none."""

    def __init__(self, pid: int, log_path: Path) -> None:
        super().__init__(log_path)
        self.pid = pid
        self._handle = ProcessHandle(pid)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._monitor = threading.Thread(target=self._watch, name="llmkernel-engine-monitor", daemon=True)
        self._monitor.start()

    @property
    def exitcode(self) -> None:
        """Nobody tells us: it is another's child."""
        return None

    def shutdown(self, timeout: float = 5.0) -> int:
        """Stop watching; the process goes on, so nothing comes back. Idempotent."""
        with self._lock:
            if self._wake_writer.fileno() >= 0:
                self._wake_writer.close()
        if threading.current_thread() is not self._monitor:
            self._monitor.join(timeout)
        return 0

    def _watch(self) -> None:
        """The monitor thread."""
        with self._handle as handle, self._wake_reader:
            watched = [self._wake_reader] + ([handle.descriptor] if handle.descriptor is not None else [])
            timeout = None if handle.descriptor is not None else POLL_SECONDS
            while not handle.ended:
                if self._wake_reader in select.select(watched, [], [], timeout)[0]:
                    return
            with self._lock:
                callbacks = self._take_exit()
        self._tell(callbacks)
