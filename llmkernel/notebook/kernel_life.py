"""KernelLife: which kernel this is, the same after a restart, and whether it will come back."""

import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmkernel.client.keep_alive import KeepAlive

__all__ = ["KernelLife"]


class KernelLife:
    """The life of the kernel that `shell` belongs to; of none, in a terminal.

    identity: the same in a restarted kernel and in no other one: made of its connection file's name, in which its id
    stands, and of the file's key, which a restart keeps. "" where there is no kernel. restarting: it has been asked to
    end and will be started again. Between `start` and `stop` it hears what Jupyter asks.
    """

    def __init__(self, shell: Any) -> None:
        kernel = getattr(shell, "kernel", None)
        self._kernel = weakref.ref(kernel) if kernel is not None else lambda: None  # clients hold us, to ask us
        self.identity = _identity(kernel)
        self.restarting = False

    def keep(self, name: str, *, auto_restart: bool) -> KeepAlive | None:
        """For an engine of this kernel that is to be kept alive; None where there is no kernel."""
        return KeepAlive(self.identity, name, auto_restart, lambda: self.restarting) if self.identity else None

    def start(self, on_shutdown: Callable[[], None]) -> None:
        """on_shutdown: called, on the kernel's control thread, when it is asked to end for good."""
        kernel = self._kernel()
        shut_down = getattr(kernel, "do_shutdown", None)
        if kernel is None or shut_down is None:  # a kernel of another kind tells nothing: its ends are taken as final
            return

        def do_shutdown(restart: bool) -> Any:
            self.restarting = restart
            if not restart:
                on_shutdown()
            return shut_down(restart)

        kernel.do_shutdown = do_shutdown

    def stop(self) -> None:
        """Idempotent."""
        kernel = self._kernel()
        if kernel is not None:
            vars(kernel).pop("do_shutdown", None)


def _identity(kernel: Any) -> str:
    name = Path(getattr(getattr(kernel, "parent", None), "connection_file", "") or "").name
    if not name:
        return ""
    key = getattr(getattr(kernel, "session", None), "key", b"")
    return hashlib.blake2s(f"{name} {key!r}".encode(), digest_size=16).hexdigest()
