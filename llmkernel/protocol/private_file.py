"""Files of this user alone: how they are opened and written, on any system."""

import os

__all__ = ["open_private", "read_at", "write_private"]

_ALWAYS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY", "O_NOINHERIT"))
"""Not inherited, not through a link, and on Windows the bytes as they are; each where there is such a thing."""


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of `path`; the file has mode 0600 if this makes it. flags: as in os.open."""
    return os.open(path, flags | _ALWAYS, 0o600)


def write_private(path: str | os.PathLike[str], content: bytes) -> None:
    """Make the file `path` of mode 0600; it must not be there yet."""
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)


def read_at(descriptor: int, count: int, position: int) -> bytes:
    """Up to `count` bytes from `position`. Where there is no pread (Windows) the descriptor moves."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.read(descriptor, count)
