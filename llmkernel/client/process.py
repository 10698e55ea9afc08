"""EngineProcess: the engine's process as its owner sees it. It starts it, watches it, and ends it and nothing else."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llmkernel.client.environment import engine_environment
from llmkernel.logger import init_logger
from llmkernel.protocol.run_directory import RunDirectory

__all__ = ["EngineProcess"]

logger = init_logger(__name__)

_QUIT = b"q"  # what parent_watch.QUIT says at the other end
_TAIL_BYTES = 64 * 2**10
_KILL_WAIT = 2.0

ExitCallback = Callable[["EngineProcess"], None]


class EngineProcess:
    """Starts the engine process at once; `shutdown` ends it. Everything may be called from any thread.

    handshake_address: where the engine says HELLO. run: the run directory; the engine's stdout and stderr go to its
    file `log`, which the engine keeps below 4 MiB. In a forked child of the owner every method that would touch the
    process does nothing.
    """

    def __init__(self, handshake_address: str, run: RunDirectory, engine_index: int = 0) -> None:
        self.log_path: Path = run.file("log")
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # held to signal and to reap: a pid that is not reaped cannot be another's
        self._exited = threading.Event()
        self._callbacks: list[ExitCallback] = []
        self._last_tail = ""
        self._popen = self._start(handshake_address, run, engine_index)
        self.pid: int = self._popen.pid
        self._monitor = threading.Thread(target=self._watch, name="llmkernel-engine-monitor", daemon=True)
        self._monitor.start()

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._popen.returncode if self._exited.is_set() else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended and is reaped; says whether it has."""
        return self._exited.wait(timeout)

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

    def shutdown(self, timeout: float = 5.0) -> int:
        """Ask the process to leave, then SIGTERM, then SIGKILL; it is reaped when this returns. Idempotent.

        timeout: seconds from asking to SIGKILL. Returns the bytes of memory that it held.
        """
        if os.getpid() != self._owner_pid:
            return 0
        held = self.memory()
        deadline = time.monotonic() + timeout
        self._ask()
        if not self.wait(timeout / 2):
            self._signal(self._popen.terminate)
            if not self.wait(max(0.0, deadline - time.monotonic())):
                self._signal(self._popen.kill)
                if not self.wait(_KILL_WAIT):
                    logger.warning("Engine process %d does not end, not even by SIGKILL.", self.pid)
        self._close_pipe()
        if threading.current_thread() is not self._monitor:
            self._monitor.join(_KILL_WAIT)
        return held

    def _start(self, handshake_address: str, run: RunDirectory, engine_index: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "llmkernel.engine", "--handshake", handshake_address]
        command += ["--run-dir", str(run.path), "--parent-pid", str(os.getpid()), "--engine-index", str(engine_index)]
        if threading.current_thread() is threading.main_thread():
            command.append("--death-signal")  # it follows the thread that starts the process
        log = os.open(self.log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                env=engine_environment(),
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _watch(self) -> None:
        """The monitor thread: wait for the end without reaping, reap under the lock, tell."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # somebody else's os.wait() took it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        with self._lock:
            self._popen.wait()
            self.log_tail()
            self._exited.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the others must hear of it too
                logger.exception("An exit callback failed.")

    def _signal(self, send: Callable[[], None]) -> None:
        with self._lock:
            if not self._exited.is_set():
                send()

    def _ask(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._popen.stdin is not None and not self._popen.stdin.closed:
                self._popen.stdin.write(_QUIT)

    def _close_pipe(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()


def _read_tail(path: Path) -> str:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        return log.read().decode("utf-8", "replace")
