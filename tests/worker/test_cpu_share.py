"""What this process may use of the machine: affinity, cores, and quotas of both kinds of cgroups."""

from pathlib import Path

import pytest

from llmkernel.engine.worker.cpu_share import read_cpu_share
from tests.worker.machines import make_machine, write


def test_threads_are_physical_cores_within_affinity_and_quota(tmp_path: Path) -> None:
    root = make_machine(tmp_path, 8, threads_per_core=2)
    assert read_cpu_share(root, range(8)).most_threads == 4
    assert read_cpu_share(root, range(8)).available == 8
    assert read_cpu_share(root, {0, 4, 1}).most_threads == 2
    write(root / "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert read_cpu_share(root, range(8)).most_threads == 4
    write(root / "sys/fs/cgroup/cpu.max", "150000 100000\n")
    share = read_cpu_share(root, range(8))
    assert (share.most_threads, share.available, share.group) == (1, 1.5, root / "sys/fs/cgroup")
    write(root / "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert read_cpu_share(root, range(8)).most_threads == 1


def test_a_quota_may_stand_at_any_parent(tmp_path: Path) -> None:
    root = make_machine(tmp_path, 8, cgroup="0::/user.slice/hub.slice/me.scope\n")
    folder = root / "sys/fs/cgroup/user.slice/hub.slice"
    write(folder / "me.scope/cpu.max", "max 100000\n")
    write(folder / "cpu.max", "300000 100000\n")
    write(folder.parent / "cpu.max", "600000 100000\n")
    share = read_cpu_share(root, range(8))
    assert (share.most_threads, share.group) == (3, folder)


@pytest.mark.parametrize("cgroup", ["4:memory:/x\n1:cpu,cpuacct:/docker/7f\n0::/\n", "1:cpu:/\n0::/\n"])
def test_old_cgroups_have_quotas_too(cgroup: str, tmp_path: Path) -> None:
    root = make_machine(tmp_path, 8, cgroup=cgroup)
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert read_cpu_share(root, range(8)).quota is None
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n")
    assert read_cpu_share(root, range(8)).most_threads == 3


def test_a_system_without_proc_and_sys(tmp_path: Path) -> None:
    share = read_cpu_share(tmp_path, range(10))
    assert (share.most_threads, share.available, share.group) == (10, 10, None)
