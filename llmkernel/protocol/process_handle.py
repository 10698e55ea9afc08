"""ProcessHandle: a process that is not ours to reap, watched without being mistaken for a later one of its pid."""

import contextlib
import errno
import os
import select
import signal
import time

__all__ = ["ProcessHandle"]

_NO_PIDFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE})
_POLL_SECONDS = 0.05


class ProcessHandle:
    """The process that has `pid` now: a pidfd where the system has them, else its pid and start time.

    ProcessLookupError if there is none. A process that has ended and is not reaped yet counts as ended. Close it, or
    use `with`.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        self._started = 0.0
        if pid <= 0 or pid.bit_length() > 31:
            raise ProcessLookupError(errno.ESRCH, f"{pid} is no pid")
        try:
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:  # no such call here, none left, or no such process
            if isinstance(error, OSError) and error.errno not in _NO_PIDFD:
                raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None
            self._started = _start_time(pid)
            if not self._started:
                raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None

    @property
    def descriptor(self) -> int | None:
        """Readable when the process has ended; None where the system has no such thing: look at `ended` then."""
        return self._descriptor

    @property
    def ended(self) -> bool:
        if self._descriptor is None:
            return self._started != _start_time(self.pid)
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended, `timeout` seconds at most; says whether it has."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], timeout)[0])
        deadline = time.monotonic() + timeout
        while not self.ended and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # nothing here tells of a process's end
        return self.ended

    def terminate(self) -> None:
        """SIGTERM, or what Windows has in its place; see `signal`."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, or what Windows has in its place; see `signal`."""
        self.signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def signal(self, number: int) -> None:
        """Send a signal to this very process; nothing happens if it has ended. PermissionError if it is not ours."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif not self.ended:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> "ProcessHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_time(pid: int) -> float:
    """Seconds since the epoch; 0 if there is no such process, or only its zombie."""
    import psutil  # lazy: only where there are no pidfds

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time())
    return 0.0
