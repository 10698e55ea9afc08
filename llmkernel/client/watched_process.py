"""WatchedProcess: an engine's process as a client sees it, its own or somebody else's."""

import abc
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llmkernel.logger import init_logger

__all__ = ["ExitCallback", "WatchedProcess"]

logger = init_logger(__name__)

_TAIL_BYTES = 64 * 2**10
_KILL_WAIT = 2.0

ExitCallback = Callable[["WatchedProcess"], None]


class WatchedProcess(abc.ABC):
    """Is it there, what does it hold, what did it write. Everything may be called from any thread.

    log_path: its output. pid: set by the subclass, whose monitor thread notes the end.
    """

    pid: int

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._lock = threading.Lock()
        self._exited = threading.Event()
        self._callbacks: list[ExitCallback] = []
        self._last_tail = ""

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    @property
    @abc.abstractmethod
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, and where nobody tells us."""

    @abc.abstractmethod
    def shutdown(self, timeout: float = 5.0) -> int:
        """End what is ours of it; idempotent. Returns the bytes of memory that came back."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended; says whether it has."""
        return self._exited.wait(timeout)

    def _end(
        self, ask: Callable[[float], None], terminate: Callable[[], None], kill: Callable[[], None], timeout: float
    ) -> None:
        """Ask it to leave, then SIGTERM, then SIGKILL, `timeout` seconds later. ask: with the seconds it may take."""
        deadline = time.monotonic() + timeout
        ask(timeout / 2)
        if self.wait(max(0.0, deadline - timeout / 2 - time.monotonic())):
            return
        self._signal(terminate)
        if self.wait(max(0.0, deadline - time.monotonic())):
            return
        self._signal(kill)
        if not self.wait(_KILL_WAIT):
            logger.warning("Engine process %d does not end, not even by SIGKILL.", self.pid)

    def _signal(self, send: Callable[[], None]) -> None:
        """Under the lock, so that what has ended meanwhile is sent nothing."""
        with self._lock:
            if not self._exited.is_set():
                send()

    def add_exit_callback(self, callback: ExitCallback) -> None:
        """Call `callback(self)` on the monitor thread when the process has ended; at once, here, if it has already."""
        with self._lock:
            if not self._exited.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def log_tail(self, lines: int = 50) -> str:
        """The last `lines` lines of the log; kept when the log itself is gone."""
        with contextlib.suppress(OSError):
            self._last_tail = _read_tail(self.log_path)
        return "\n".join(self._last_tail.splitlines()[-lines:])

    def memory(self) -> int:
        """Bytes of memory that the process holds (resident), 0 when it has ended."""
        import psutil  # lazy: 20 ms that a kernel does not pay until somebody asks

        try:
            return 0 if self._exited.is_set() else int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _take_exit(self) -> list[ExitCallback]:
        """The process has ended: note it, under the lock. The callbacks to call then, without it."""
        self.log_tail()
        self._exited.set()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def _tell(self, callbacks: list[ExitCallback]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the others must hear of it too
                logger.exception("An exit callback failed.")


def _read_tail(path: Path) -> str:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        return log.read().decode("utf-8", "replace")
