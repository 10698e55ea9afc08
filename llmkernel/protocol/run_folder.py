"""The folder of a run on the disk: is it ours, and how it goes away. Light to import: an engine's guards use it."""

import os
import shutil
import stat
from pathlib import Path

from llmkernel.errors import LLMKernelError

__all__ = ["RunDirectoryError", "check_private", "remove_orphan", "remove_tree"]

_WINDOWS = os.name == "nt"
_REMOVALS = 5


class RunDirectoryError(LLMKernelError, OSError):
    """A folder that sockets must not live in, or no folder at all; the message says which and why."""


def check_private(folder: Path) -> None:
    """RunDirectoryError unless `folder` is a directory of ours, no link, of mode 0700."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"{folder} is not a folder (a link is refused).")
    if _WINDOWS:  # no owners and modes: the temporary folder lies in the user's profile, which others cannot read
        return
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(f"{folder} belongs to another user.")
    if stat.S_IMODE(status.st_mode) != 0o700:
        raise RunDirectoryError(f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}, not 0700.")


def remove_tree(folder: Path) -> bool:
    """Remove `folder` with all that is in it; says whether it is gone.

    Somebody may still write a file into it meanwhile, so what is not empty is emptied again.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return True
    return False


def remove_orphan(path: str | os.PathLike[str]) -> bool:
    """Remove a run directory that is nobody's, whatever its lock says: its owner is known to be dead, or the lock is
    gone (the rest of a removal that was cut short, or of a start that was). Says whether it is gone by this call.

    A dead owner's lock cannot be waited for: the system closes its files a moment before or after its children see it
    gone, and what native code forked from it holds them for as long as it likes.
    """
    folder = Path(path)
    try:
        check_private(folder)
    except OSError:
        return False  # not ours, or gone already
    return remove_tree(folder)
