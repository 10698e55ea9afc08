"""Files of machines that are not here: processors and their cores, cgroups, the counters of /proc/stat."""

from pathlib import Path

QUIET, PER_SECOND = 1000, 100
"""Ticks that each processor was busy before anything happens, ticks of a second."""


def make_machine(root: Path, cpus: int, *, threads_per_core: int = 1, cgroup: str = "0::/\n") -> Path:
    """`cpus` processors: those of one core are cores apart, as Linux numbers them."""
    cores = cpus // threads_per_core
    for cpu in range(cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(threads_per_core))
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    write(root / "proc/self/cgroup", cgroup)
    set_busy(root, dict.fromkeys(range(cpus), 0.0))
    return root


def set_busy(root: Path, seconds: dict[int, float]) -> None:
    """How long each processor was busy: a third in programs, the rest in interrupts and stolen by other machines."""
    ticks = {cpu: QUIET + round(busy * PER_SECOND) for cpu, busy in seconds.items()}
    lines = [_line("cpu", sum(ticks.values())), *(_line(f"cpu{cpu}", busy) for cpu, busy in ticks.items()), "intr 9 9"]
    write(root / "proc/stat", "\n".join(lines) + "\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _line(name: str, busy: int) -> str:
    user, stolen = busy // 3, busy // 3
    return f"{name} {user} 0 0 77777 88 {busy - user - stolen} 0 {stolen} {user} 0"
