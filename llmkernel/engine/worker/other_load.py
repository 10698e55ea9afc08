"""OtherLoad: how much of the processors' time others take: what all took, less what this process took itself."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from llmkernel.engine.worker.cpu_share import CpuShare

__all__ = ["OtherLoad", "find_counter"]

Seconds = Callable[[], float]

_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)
"""user, nice, system, irq, softirq, steal of a line of /proc/stat; guests are within user."""


class OtherLoad:
    """Processors' worth of time (1.0 = one of them all the time) that others took between two reads.

    taken: seconds of processor time that everybody took so far, this process too.
    """

    def __init__(self, taken: Seconds, *, clock: Seconds = time.monotonic, own: Seconds = time.process_time) -> None:
        self._counters = (clock, taken, own)
        self._last = self._count()

    def read(self) -> float | None:
        """Since the last read, or since this object was made; None if the counters cannot be read any more."""
        try:
            before, self._last = self._last, self._count()
        except (OSError, ValueError):
            return None
        passed, taken, own = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, taken - own) / passed if passed > 0 else 0.0

    def _count(self) -> tuple[float, ...]:
        return tuple(counter() for counter in self._counters)


def find_counter(share: CpuShare, root: Path = Path("/")) -> Seconds | None:
    """The seconds that everybody took of the processors in `share`, to be called again and again; None: nobody tells.

    Without a quota /proc/stat, line by line of the processors in the affinity. With one it speaks of the host, where
    others may be busy on processors that we could not have anyway: then the cgroup's own account counts.
    """
    taken = _processors(root, share.cpus) if share.group is None else _group(root, share.group)
    try:
        return taken if taken() > 0 else None  # sandboxes show zeros
    except (OSError, ValueError, IndexError):
        return None


def _processors(root: Path, cpus: frozenset[int]) -> Seconds:
    path = root / "proc/stat"
    names = {f"cpu{cpu}" for cpu in cpus}
    tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

    def taken() -> float:
        total = 0
        with path.open(encoding="ascii") as lines:
            for line in lines:
                if not line.startswith("cpu"):
                    break
                fields = line.split()
                if fields[0] in names:
                    total += sum(int(fields[place]) for place in _BUSY_FIELDS)
        return total / tick

    return taken


def _group(root: Path, group: Path) -> Seconds:
    """The cgroup's processor time: version 2's cpu.stat, version 1's cpuacct.usage."""
    if (group / "cpu.max").exists():
        return lambda: _field(group / "cpu.stat", "usage_usec") / 1e6
    mounted = root / "sys/fs/cgroup"
    usage = mounted / "cpuacct" / group.relative_to(mounted / "cpu") / "cpuacct.usage"
    return lambda: int(usage.read_text()) / 1e9


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    raise ValueError(f"{path} has no {name}")
