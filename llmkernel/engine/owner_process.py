"""OwnerProcess: the process that started this engine and with which it ends."""

import contextlib
import os

from llmkernel.protocol.process_handle import ProcessHandle

__all__ = ["OwnerProcess"]

_PARENTS_STAY = os.name == "nt"  # there a process keeps the pid of a parent that has ended


class OwnerProcess:
    """Our parent, by its pid; any thread may look whether it is still there.

    Once it is gone it stays gone. It may still be closing its files then: its locks are free a moment sooner or later.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle: ProcessHandle | None = None
        if _PARENTS_STAY:
            with contextlib.suppress(ProcessLookupError):  # it is gone already
                self._handle = ProcessHandle(pid)

    @property
    def gone(self) -> bool:
        if _PARENTS_STAY:
            return self._handle is None or self._handle.ended
        return os.getppid() != self.pid
