"""How the engine process ends: asked by its owner or by SIGTERM, or because the owner is gone."""

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from llmkernel.engine.owner_process import OwnerProcess
from llmkernel.engine.system_alarm import set_alarm
from llmkernel.protocol.run_folder import remove_orphan

__all__ = ["Departure"]

GRACE_SECONDS = 0.3
_OWNER_GONE_SECONDS = 0.5
_CLEANUP_SECONDS = 0.9
"""For a dead owner's engine, from when a guard runs; then the system's alarm ends it, 2 s after the owner at most."""


class Departure:
    """One per process. `requested` becomes true once, whoever asks.

    While the model loads a request unwinds the load (SystemExit in the main thread); afterwards it wakes the busy loop,
    which leaves between two steps. A main thread that does not come back (a long forward) is left behind after
    GRACE_SECONDS.

    owner: with which the engine ends; None for one that is kept alive. run_dir: the run directory, which goes with a
    dead owner even if we never joined the run, and whoever else holds its lock.
    """

    def __init__(self, owner: OwnerProcess | None, run_dir: str | os.PathLike[str]) -> None:
        self.requested = False
        self._owner = owner
        self._run_dir = run_dir
        self._wake: Callable[[], None] | None = None
        self._farewell: Callable[[], None] | None = None
        self._cleanup: Callable[[], None] = lambda: None
        self._exiting = threading.Lock()

    def install_signals(self) -> None:
        """SIGTERM asks us to go. SIGINT is ignored: an interrupted cell must not end the engine (better.md E-1)."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_exit(self, cleanup: Callable[[], None]) -> None:
        """What to let go of at the end, whether the owner lives or not."""
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
        set_alarm(_CLEANUP_SECONDS)  # the parent's death has set one, perhaps long ago
        deadline = time.monotonic() + _OWNER_GONE_SECONDS
        while not self._owner_is_dead() and time.monotonic() < deadline:
            time.sleep(0.005)  # its pipe closes a moment before it is gone
        self.exit(0)

    def exit(self, code: int) -> None:
        """End the process without Python's and torch's own teardown, which is slow and may crash.

        Two guards may see the owner go at the same moment: who comes second lets the first one clean up.
        """
        if self._owner_is_dead():
            set_alarm(_CLEANUP_SECONDS)
        self._exiting.acquire(timeout=_CLEANUP_SECONDS)
        try:
            self._clean_up()
        finally:
            os._exit(code)

    def _clean_up(self) -> None:
        with contextlib.suppress(OSError):
            self._cleanup()
        if self._owner_is_dead():
            remove_orphan(self._run_dir)

    def _owner_is_dead(self) -> bool:
        return self._owner is not None and self._owner.gone

    def _on_sigterm(self, *_: object) -> None:
        if self._exiting.locked():
            return  # unwinding now would leave half of the clean-up
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
