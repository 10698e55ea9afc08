"""How the engine process ends: asked by its owner or by SIGTERM, or because the owner is gone."""

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

__all__ = ["Departure"]

GRACE_SECONDS = 0.3
_OWNER_GONE_SECONDS = 0.8
_CLEANUP_SECONDS = 1.0


class Departure:
    """One per process. `requested` becomes true once, whoever asks.

    While the model loads a request unwinds the load (SystemExit in the main thread); afterwards it wakes the busy loop,
    which leaves between two steps. A main thread that does not come back (a long forward) is left behind after
    GRACE_SECONDS.
    """

    def __init__(self, parent_pid: int) -> None:
        self.requested = False
        self._parent_pid = parent_pid
        self._wake: Callable[[], None] | None = None
        self._farewell: Callable[[], None] | None = None
        self._cleanup: Callable[[], None] | None = None
        self._exiting = threading.Lock()

    def install_signals(self) -> None:
        """SIGTERM asks us to go. SIGINT is ignored: an interrupted cell must not end the engine (better.md E-1)."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_exit(self, cleanup: Callable[[], None]) -> None:
        """What is left to remove when the owner cannot do it any more."""
        self._cleanup = cleanup

    def attach_loop(self, wake: Callable[[], None], farewell: Callable[[], None]) -> None:
        """From now on a request calls `wake` (safe in a signal handler) instead of unwinding the main thread.

        farewell: tells the clients, before the process leaves without its busy loop; bounded.
        """
        self._farewell = farewell
        self._wake = wake
        if self.requested:
            wake()

    def request(self) -> None:
        """Ask from any thread but the main one; does not return."""
        _signal_main_thread(signal.SIGTERM)
        time.sleep(GRACE_SECONDS)  # a deadline: a main thread that is free ends the process earlier
        if self._farewell is not None:
            self._farewell()
        self.exit(0)

    def owner_is_gone(self) -> None:
        """Leave at once; the run directory goes with us."""
        deadline = time.monotonic() + _OWNER_GONE_SECONDS
        while os.getppid() == self._parent_pid and time.monotonic() < deadline:
            time.sleep(0.005)  # its pipe closes a moment before its lock on the run directory does
        self.exit(0)

    def exit(self, code: int) -> None:
        """End the process without Python's and torch's own teardown, which is slow and may crash.

        Two guards may see the owner go at the same moment: who comes second lets the first one clean up.
        """
        self._exiting.acquire(timeout=_CLEANUP_SECONDS)
        if self._cleanup is not None:
            with contextlib.suppress(OSError):
                self._cleanup()
        os._exit(code)

    def _on_sigterm(self, *_: object) -> None:
        self.requested = True
        if self._wake is None:
            raise SystemExit(0)
        self._wake()


def _signal_main_thread(number: signal.Signals) -> None:
    """Deliver `number` so that a lock or socket on which the main thread waits lets go."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, number)
    else:
        _thread.interrupt_main(number)  # Windows
