"""The engine's log: stdout and stderr of the process, a file of bounded size."""

import os
import stat

from llmkernel.protocol.private_file import read_at

__all__ = ["LOG_LIMIT", "trim_log"]

LOG_LIMIT = 4 * 2**20
"""Bytes from which the older half of the log is dropped."""


def trim_log(descriptor: int = 1, limit: int = LOG_LIMIT) -> bool:
    """Drop the older half of the file behind `descriptor` when it is longer than `limit` bytes; says whether it did.

    The file must be open for reading and appending. Lines that are written meanwhile may be lost, never garbled.
    Anything but a regular file is left alone.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit:
        return False
    kept = read_at(descriptor, limit // 2, max(0, status.st_size - limit // 2))
    start = kept.find(b"\n") + 1
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"[earlier lines were dropped]\n" + kept[start:])
    return True
