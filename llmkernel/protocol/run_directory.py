"""The run directory: the private folder in which the sockets and the log of one run live.

A run is alive while some process holds its lock file, never by a pid: the system drops the lock when the last holder
ends, however it ends. Holders share the lock (flock LOCK_SH); whoever removes a dead run must get it alone.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

from llmkernel.logger import init_logger
from llmkernel.protocol.file_lock import try_share, try_take
from llmkernel.protocol.run_folder import RunDirectoryError, check_private, remove_orphan, remove_tree
from llmkernel.protocol.transport import MAX_IPC_PATH

__all__ = [
    "RunDirectory",
    "RunDirectoryError",
    "RunDirectoryHeldError",
    "default_base",
    "live_runs",
    "remove_dead",
    "sweep_dead",
]

logger = init_logger(__name__)

LOCK_NAME = "lock"
_FINISHED = re.compile(r"llmk-[0-9a-f]{8}")
_UNFINISHED = re.compile(r"llmk-[0-9a-f]{8}\.new")
_SOCKET_NAME = re.compile(r"[a-z0-9]{1,8}")
_LONGEST_TAIL = len("/llmk-00000000/12345678")
_UNFINISHED_AGE = 60.0
_WINDOWS = os.name == "nt"
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class RunDirectoryHeldError(RunDirectoryError):
    """A run that is alive."""


class RunDirectory:
    """A fresh run directory of mode 0700, locked while this object lives. Close it, or use `with`.

    base: the folder to make it in; None = `default_base()`. Closing removes the directory with all that is in it. In a
    forked child every method that would change something does nothing: the directory is the parent's.

    transport: "ipc": the sockets are files in it. "tcp": they are ports, each protected by the run's key, because the
    system has no such files (Windows), the path is too long for them, or LLMKERNEL_TRANSPORT=tcp says so.
    """

    transport: Literal["ipc", "tcp"]

    def __init__(self, base: str | os.PathLike[str] | None = None) -> None:
        self.transport = "tcp" if _wants_tcp() else "ipc"
        if base is None:
            try:
                folder = default_base(for_sockets=self.transport == "ipc")
            except RunDirectoryError:
                folder, self.transport = default_base(for_sockets=False), "tcp"
        else:
            folder = Path(base)
            _check_base(folder, for_sockets=self.transport == "ipc")
        self._owns = True
        self._start(*_make_directory(folder))

    @classmethod
    def join(cls, path: str | os.PathLike[str], transport: Literal["ipc", "tcp"] = "ipc") -> "RunDirectory":
        """Hold the run at `path`, which another process made: it stays alive until this object is closed too.

        Closing removes the directory if nobody else holds it. RunDirectoryError if it is a link, of another owner, of
        another mode, or dead.
        """
        run = cls.__new__(cls)
        run._owns = False
        run.transport = transport
        folder = Path(path)
        check_private(folder)
        run._start(folder, _lock(folder, try_share))
        return run

    def _start(self, path: Path, lock: int) -> None:
        self.path = path
        self._pid = os.getpid()
        self._lock: int | None = lock
        _open_runs.add(self)

    def file(self, name: str) -> Path:
        """Path of the file or socket `name` in this directory: 1 to 8 lower-case letters and digits."""
        if not _SOCKET_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name in a run directory; use 1 to 8 of a-z, 0-9.")
        return self.path / name

    def address(self, name: str) -> str:
        """ZMQ address to bind the socket `name` to. Where it is tcp any free port will do: ask `bound_address` then."""
        return f"ipc://{self.file(name)}" if self.transport == "ipc" else "tcp://127.0.0.1:*"

    @property
    def closed(self) -> bool:
        return self._lock is None

    def close(self) -> None:
        """Let go of the run. The maker removes the directory; others do when nobody else holds it. Idempotent."""
        if self._lock is None or os.getpid() != self._pid:
            return
        lock, self._lock = self._lock, None
        try:
            if self._owns or try_take(lock):
                _remove(self.path, lock)
        finally:
            os.close(lock)

    def remove(self) -> None:
        """Remove the directory of a run that its maker ends, before it ends the others who hold it: whenever the maker
        dies on the way, nothing is left, or somebody is there who removes it. Nothing for those who joined, nor on
        Windows, where open files stay; `close` is still to be called.
        """
        if self._owns and not _WINDOWS and self._lock is not None and os.getpid() == self._pid:
            remove_tree(self.path)

    def leave(self) -> None:
        """Let go of the run, which goes on: another process holds it. Nothing is removed. Idempotent."""
        if self._lock is not None and os.getpid() == self._pid:
            lock, self._lock = self._lock, None
            os.close(lock)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_after_fork(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # the parent's lock stays; without this the child would keep the run alive after it
            self._lock = None


_open_runs: "weakref.WeakSet[RunDirectory]" = weakref.WeakSet()


def _forget_runs_after_fork() -> None:
    for run in list(_open_runs):
        run._forget_after_fork()
    _open_runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_runs_after_fork)


def default_base(*, for_sockets: bool = True) -> Path:
    """Where run directories are made: XDG_RUNTIME_DIR if it is private and short enough, else the temporary folder.

    for_sockets False: however long its path is.
    """
    candidates = _candidates()
    for folder in candidates:
        try:
            _check_base(folder, for_sockets=for_sockets)
        except RunDirectoryError as error:
            logger.warning("%s Trying another folder.", error)
        else:
            return folder
    raise RunDirectoryError(
        f"No folder for sockets among {', '.join(map(str, candidates))}; set XDG_RUNTIME_DIR to a private folder "
        f"(mode 0700) with a short path."
    )


def live_runs(base: str | os.PathLike[str] | None = None) -> list[Path]:
    """Run directories of ours whose lock somebody holds, in `base`, or wherever `default_base` may have made them."""
    folders = _candidates() if base is None else [Path(base)]
    paths = [path for folder in dict.fromkeys(folders) for path in folder.glob("llmk-*")]
    return [path for path in sorted(paths) if _FINISHED.fullmatch(path.name) and _is_alive(path)]


def sweep_dead(base: str | os.PathLike[str] | None = None) -> list[Path]:
    """Remove the run directories in `base` whose lock nobody holds; returns them. Live ones are never touched."""
    folder = default_base(for_sockets=not _wants_tcp()) if base is None else Path(base)
    now = time.time()
    removed = []
    for path in sorted(folder.glob("llmk-*")):
        if _FINISHED.fullmatch(path.name):
            gone = remove_dead(path)
        else:
            gone = bool(_UNFINISHED.fullmatch(path.name)) and _age(path, now) > _UNFINISHED_AGE and remove_dead(path)
        if gone:
            removed.append(path)
    return removed


def remove_dead(path: str | os.PathLike[str]) -> bool:
    """Remove the run directory `path` if nobody holds its lock; says whether it is gone by this call."""
    folder = Path(path)
    try:
        check_private(folder)
        lock = _lock(folder, try_take)
    except FileNotFoundError:
        return remove_orphan(folder)  # no lock file
    except OSError:
        return False  # not ours, or alive
    try:
        _remove(folder, lock)
    finally:
        os.close(lock)
    return not folder.exists()


def _candidates() -> list[Path]:
    named = os.environ.get("XDG_RUNTIME_DIR")
    return [*([Path(named)] if named else []), Path(os.path.realpath(tempfile.gettempdir())), Path("/tmp")]


def _is_alive(folder: Path) -> bool:
    """It is ours, and its lock is held. Nobody is in the way: the lock of a live run is never free to be taken here."""
    try:
        check_private(folder)
        os.close(_lock(folder, try_take))
    except RunDirectoryHeldError:
        return True
    except OSError:
        pass
    return False


def _wants_tcp() -> bool:
    return _WINDOWS or os.environ.get("LLMKERNEL_TRANSPORT") == "tcp"


def _check_base(folder: Path, *, for_sockets: bool) -> None:
    """A base is private to us, or sticky like /tmp, where nobody can rename or remove what is ours."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be used for sockets: {error.strerror}.") from error
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if not sticky or _WINDOWS or status.st_uid not in (0, os.geteuid()):
        check_private(folder)
    too_long = for_sockets and len(os.fsencode(folder)) + _LONGEST_TAIL >= MAX_IPC_PATH
    if not folder.is_absolute() or too_long:
        raise RunDirectoryError(f"{folder} is not an absolute path that is short enough for sockets.")


def _make_directory(base: Path) -> tuple[Path, int]:
    """(path, lock). The directory gets its name when its lock is held, so that no sweep can see it unlocked."""
    name = f"llmk-{secrets.token_hex(4)}"
    path = base / name
    unfinished = path if _WINDOWS else base / f"{name}.new"  # there a folder with an open file keeps its name
    unfinished.mkdir(mode=0o700)
    lock: int | None = None
    try:
        unfinished.chmod(0o700)  # whatever the umask says
        lock = os.open(unfinished / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try_share(lock)
        if unfinished != path:
            unfinished.rename(path)
    except BaseException:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path, lock


def _lock(folder: Path, kind: Callable[[int], bool]) -> int:
    """Open and lock the lock file of `folder`. FileNotFoundError without one, RunDirectoryError if others hold it."""
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | _FLAGS)
    try:
        if not kind(lock):
            raise RunDirectoryHeldError(f"{folder} is held by another process.")
        if os.fstat(lock).st_nlink == 0:
            raise RunDirectoryError(f"{folder} is gone.")
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path, lock: int) -> None:
    """Remove the directory whose lock we have. On Windows the lock's own file stays until it is closed."""
    if not remove_tree(folder) and _WINDOWS:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), lock)  # lets go of the lock's file; whoever closes `lock` need not know
        remove_tree(folder)


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except OSError:
        return 0.0
