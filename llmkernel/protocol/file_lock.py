"""A lock on an open file that several processes share, or one takes alone; the system drops it when its holder ends.

flock where there is such a thing. On Windows locks lie on bytes: a share is any free one of them, taking it alone means
all of them.
"""

import contextlib
import errno
import os
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["take_behind", "try_share", "try_take"]

_BYTES = 64
_FIRST_BYTE = 1
_BEHIND = 2**31 - 2
_shares: dict[int, int] = {}  # descriptor -> its byte
_windows: Any = None  # msvcrt, once it is needed

_HELD = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK})


def try_share(descriptor: int) -> bool:
    """Share the lock; False if somebody has it alone."""
    if fcntl is not None:
        return _flock(descriptor, fcntl.LOCK_SH)
    for byte in range(_FIRST_BYTE, _FIRST_BYTE + _BYTES):
        if _lock_bytes(descriptor, byte, 1):
            _shares[descriptor] = byte
            return True
    return False


def try_take(descriptor: int) -> bool:
    """Have the lock alone; False if somebody else holds it. A share through `descriptor` becomes that."""
    if fcntl is not None:
        return _flock(descriptor, fcntl.LOCK_EX)
    byte = _shares.pop(descriptor, None)
    if byte is not None:
        _unlock_byte(descriptor, byte)
    if _lock_bytes(descriptor, _FIRST_BYTE, _BYTES):
        return True
    if byte is not None and _lock_bytes(descriptor, byte, 1):
        _shares[descriptor] = byte
    return False


def take_behind(descriptor: int) -> None:
    """Have a file with content alone; waits for who has it, OSError after 10 s on Windows. There the lock lies behind
    the content, 2 GiB from its beginning: others may read what stands in the file.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    os.lseek(descriptor, _BEHIND, os.SEEK_SET)
    _msvcrt().locking(descriptor, _msvcrt().LK_LOCK, 1)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def _msvcrt() -> Any:
    global _windows
    if _windows is None:
        import msvcrt  # there is none elsewhere

        _windows = msvcrt
    return _windows


def _lock_bytes(descriptor: int, first: int, count: int) -> bool:
    os.lseek(descriptor, first, os.SEEK_SET)
    with contextlib.suppress(OSError):
        _msvcrt().locking(descriptor, _msvcrt().LK_NBLCK, count)
        return True
    return False


def _unlock_byte(descriptor: int, byte: int) -> None:
    os.lseek(descriptor, byte, os.SEEK_SET)
    _msvcrt().locking(descriptor, _msvcrt().LK_UNLCK, 1)
