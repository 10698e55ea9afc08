"""CpuShare: the processors that this process may use: affinity, physical cores, the quota of its cgroup."""

import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["CpuShare", "read_cpu_share"]


@dataclasses.dataclass(frozen=True)
class CpuShare:
    """cpus: the processors within the affinity. cores: physical cores that these are; hyperthreads count once.

    quota: processors' worth of time that the cgroup in `group` may take; None without a limit.
    """

    cpus: frozenset[int]
    cores: int
    quota: float | None = None
    group: Path | None = None

    @property
    def available(self) -> float:
        """Processors' worth of time on a machine where nobody else runs."""
        return len(self.cpus) if self.quota is None else min(len(self.cpus), self.quota)

    @property
    def most_threads(self) -> int:
        """Threads that can all run at once, at least 1."""
        return max(1, self.cores if self.quota is None else min(self.cores, int(self.quota)))


def read_cpu_share(root: Path = Path("/"), cpus: Collection[int] | None = None) -> CpuShare:
    """The share of this process. root: where proc and sys are mounted; cpus: instead of the affinity."""
    usable = _affinity() if cpus is None else frozenset(cpus)
    cores = {_siblings(root / "sys/devices/system/cpu", cpu) for cpu in usable}
    limits = [(quota, group) for group in _groups(root) if (quota := _quota(group)) is not None]
    quota, group = min(limits, default=(None, None), key=lambda limit: limit[0])
    return CpuShare(usable, len(cores), quota, group)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _siblings(topology: Path, cpu: int) -> str:
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the cgroups that this process is in, with their parents: a limit may stand at any of them.

    Inside a container the path may be the host's, while the mount starts at the container: its root is what counts.
    """
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mounted / "cpu" if controllers else mounted
        own = base / path.lstrip("/")
        yield own
        yield from (parent for parent in own.parents if parent.is_relative_to(base))


def _quota(group: Path) -> float | None:
    """Processors' worth of time that this cgroup may take, by version 2 or 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
