"""The guards that end the engine when its owner is gone. They run before torch is imported, beside the busy loop.

Three of them, because each has a hole: the stdin pipe stays open while a forked sibling of the owner holds it, the
kernel's parent-death signal follows the *thread* that started us, and polling the parent's pid is slow.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

from llmkernel.engine.owner_process import OwnerProcess

__all__ = ["QUIT", "ParentWatch"]

QUIT = b"q"
"""What the owner writes into our stdin to ask us to leave; closing it says that the owner is gone."""

POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class ParentWatch:
    """Calls `on_gone` (on a thread of its own, perhaps twice) when the owner is gone, `on_quit` when it asks us to go.

    owner: None: the engine is kept alive, others watch its owner, and a closed pipe means nothing. each_poll: called at
    every look at the owner, every POLL_SECONDS; keep it cheap.
    """

    def __init__(
        self,
        owner: OwnerProcess | None,
        *,
        on_gone: Callable[[], None],
        on_quit: Callable[[], None],
        each_poll: Callable[[], object] | None = None,
    ) -> None:
        self._owner = owner
        self._on_gone = on_gone
        self._on_quit = on_quit
        self._each_poll = each_poll

    def start(self, *, death_signal: bool) -> None:
        """Start the guards. death_signal: the owner's main thread started us, so the kernel's signal can be trusted."""
        if death_signal and sys.platform == "linux":
            _leave_a_second_after_the_parent()
        if self._owner is not None and self._owner.gone:  # before the signal was set
            self._on_gone()
        threading.Thread(target=self._watch_pipe, name="llmkernel-owner-pipe", daemon=True).start()
        threading.Thread(target=self._watch_pid, name="llmkernel-owner-pid", daemon=True).start()

    def _watch_pipe(self) -> None:
        while True:
            try:
                asked = os.read(sys.stdin.fileno(), 64)
            except OSError:
                asked = b""  # a closed stdin says the same
            if not asked:
                if self._owner is not None:
                    self._on_gone()
                return
            if QUIT in asked:
                self._on_quit()

    def _watch_pid(self) -> None:
        pause = threading.Event()
        while not pause.wait(POLL_SECONDS):
            if self._owner is not None and self._owner.gone:
                self._on_gone()
                return
            if self._each_poll is not None:
                self._each_poll()


def _leave_a_second_after_the_parent() -> None:
    """SIGHUP when the parent dies, and with it SIGALRM a second later, which ends us even if no Python code can run.

    SIGKILL at once would be surer still, but then nobody could remove the run directory. The handler is libc's
    alarm(seconds) itself: SIGHUP is signal 1, so the alarm rings after one second. Departure puts it off for its
    clean-up.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc: the other guards hold
        libc = ctypes.CDLL(None, use_errno=True)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGHUP), ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
