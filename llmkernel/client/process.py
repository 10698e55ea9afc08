"""EngineProcess: the engine's process as its owner sees it. It starts it, watches it, and ends it and nothing else."""

import contextlib
import os
import subprocess
import sys
import threading

from llmkernel.client.environment import engine_environment
from llmkernel.client.watched_process import WatchedProcess
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.private_file import open_private
from llmkernel.protocol.run_directory import RunDirectory

__all__ = ["EngineProcess"]

_QUIT = b"q"  # what parent_watch.QUIT says at the other end
_MONITOR_WAIT = 2.0
_CREATION_FLAGS = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)
"""On Windows, where there are no sessions: no Ctrl-C of the owner's console, and no console of its own."""


class EngineProcess(WatchedProcess):
    """Starts the engine process at once; `shutdown` ends it.

    handshake_address: where the engine says HELLO. run: the run directory; the engine's stdout and stderr go to its
    file `log`, which the engine keeps below 4 MiB. key: of the run, where its sockets are tcp; the engine hears it
    through its stdin. keep_alive: seconds for which it stays when we are gone; None: it goes with us.

    The lock is held to signal and to reap: a pid that is not reaped cannot be another's. In a forked child of the owner
    every method that would touch the process does nothing.
    """

    def __init__(
        self,
        handshake_address: str,
        run: RunDirectory,
        engine_index: int = 0,
        *,
        key: CurveKey | None = None,
        keep_alive: float | None = None,
    ) -> None:
        super().__init__(run.file("log"))
        self._owner_pid = os.getpid()
        self._popen = self._start(handshake_address, run, engine_index, with_key=key is not None, keep_alive=keep_alive)
        if key is not None:
            self._write(bytes(key))
        self.pid: int = self._popen.pid
        self._monitor = threading.Thread(target=self._watch, name="llmkernel-engine-monitor", daemon=True)
        self._monitor.start()

    @property
    def exitcode(self) -> int | None:
        return self._popen.returncode if self._exited.is_set() else None

    def shutdown(self, timeout: float = 5.0) -> int:
        """Ask the process to leave, then SIGTERM, then SIGKILL; it is reaped when this returns. Idempotent.

        timeout: seconds from asking to SIGKILL. Returns the bytes of memory that it held.
        """
        if os.getpid() != self._owner_pid:
            return 0
        held = self.memory()
        self._end(lambda _: self._write(_QUIT), self._popen.terminate, self._popen.kill, timeout)
        self._close_pipe()
        if threading.current_thread() is not self._monitor:
            self._monitor.join(_MONITOR_WAIT)
        return held

    def _start(
        self,
        handshake_address: str,
        run: RunDirectory,
        engine_index: int,
        *,
        with_key: bool,
        keep_alive: float | None,
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "llmkernel.engine", "--handshake", handshake_address]
        command += ["--run-dir", str(run.path), "--parent-pid", str(os.getpid()), "--engine-index", str(engine_index)]
        if keep_alive is not None:
            command += ["--keep-alive", str(keep_alive)]
        elif threading.current_thread() is threading.main_thread():
            command.append("--death-signal")  # it follows the thread that starts the process
        if with_key:
            command.append("--key-on-stdin")
        log = open_private(self.log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                env=engine_environment(),
                start_new_session=True,
                creationflags=_CREATION_FLAGS,
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
            callbacks = self._take_exit()
        self._tell(callbacks)

    def _write(self, message: bytes) -> None:
        """Say something on the engine's stdin; it may be gone."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._popen.stdin is not None and not self._popen.stdin.closed:
                self._popen.stdin.write(message)

    def _close_pipe(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()
