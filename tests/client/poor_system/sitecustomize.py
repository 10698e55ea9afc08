"""Imported by every Python that has this folder in PYTHONPATH: a system without what Windows, or macOS, is without.

msvcrt stands in for Windows' own: locks on bytes that belong to an open file, as there.
"""

import asyncio  # what other libraries need is looked up before it goes
import fcntl
import multiprocessing.util
import os
import signal
import struct
import subprocess
import sys
import types

import psutil

assert asyncio and multiprocessing.util and psutil and subprocess


def locking(descriptor: int, mode: int, count: int) -> None:
    """As msvcrt.locking, from where `descriptor` stands."""
    kind = fcntl.F_UNLCK if mode == LK_UNLCK else fcntl.F_WRLCK
    place = struct.pack("hhqqi4x", kind, os.SEEK_SET, os.lseek(descriptor, 0, os.SEEK_CUR), count, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if mode == LK_LOCK else fcntl.F_OFD_SETLK, place)


LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2
msvcrt = types.ModuleType("msvcrt")
vars(msvcrt).update(LK_UNLCK=LK_UNLCK, LK_LOCK=LK_LOCK, LK_NBLCK=LK_NBLCK, locking=locking)
sys.modules["msvcrt"] = msvcrt
sys.modules["fcntl"] = None  # type: ignore[assignment]
for module, names in {
    os: ("O_CLOEXEC", "O_NOFOLLOW", "pread", "pidfd_open", "waitid", "sysconf", "sched_getaffinity"),
    signal: ("SIGALRM", "alarm", "setitimer", "pidfd_send_signal", "pthread_kill"),
}.items():
    for name in names:
        delattr(module, name)
