"""How many threads a step gets: by what others take, by step times where nobody says, and as asked for."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llmkernel.engine.worker.cpu_share import read_cpu_share
from llmkernel.engine.worker.load_rule import STALE, WINDOW, LoadRule, ThreadRoom, next_room
from llmkernel.engine.worker.other_load import OtherLoad, find_counter
from llmkernel.engine.worker.step_time_rule import LONGEST_WAIT, StepTimeRule
from llmkernel.engine.worker.thread_governor import ThreadGovernor, thread_rules
from tests.worker.machines import make_machine, set_busy, write

IDLE = [0.0, 0.1, 0.05]


@pytest.mark.parametrize(
    ("available", "most", "windows", "threads"),
    [
        (2, 2, IDLE, [2, 2, 2]),
        (2, 2, [1.0, 0.9, 1.1], [1, 1, 1]),  # one core is taken
        (2, 2, [1.3, 2.0, 1.9], [1, 1, 1]),  # both
        (2, 2, [1.0, 0.1, 0.1, 0.1], [1, 1, 2, 2]),  # it comes back after two quiet windows
        (2, 2, [1.0, 0.1, 0.6, 0.1, 0.6], [1, 1, 1, 1, 1]),
        (2, 2, [0.3, 0.35, 0.3, 0.39], [2, 2, 2, 2]),  # noise takes nothing away,
        (2, 2, [1.0, 0.3, 0.35, 0.3], [1, 1, 1, 1]),  # and gives nothing back
        (64, 64, [0.3, 10.2, 30.7, 70.0], [64, 54, 33, 1]),
        (64, 32, [0.3, 10.2, 30.7, 40.0], [32, 32, 32, 24]),  # two threads per core: half of the hub may be busy
        (64, 64, [20.0, 18.9, 19.5, 18.0, 20.1], [44, 44, 44, 44, 44]),
        (64, 64, [20.0, 8.0, 10.0, 10.0], [44, 44, 54, 54]),
        (1.5, 1, IDLE, [1, 1, 1]),  # a quota of a processor and a half
        (2, 2, [], []),
    ],
)
def test_threads_by_what_others_take(available: float, most: int, windows: list[float], threads: list[int]) -> None:
    room, seen = ThreadRoom(most, most), []
    for other in windows:
        room = next_room(room, available=available, other=other, most=most)
        seen.append(room.threads)
    assert seen == threads


class Machine:
    """A clock, and the processor time that everybody and that we took so far."""

    def __init__(self) -> None:
        self.now = self.taken = self.own = 0.0

    def pass_time(self, seconds: float, others: float, own: float = 0.0) -> float:
        self.now += seconds
        self.own += seconds * own
        self.taken += seconds * (own + others)
        return self.now

    def load(self) -> OtherLoad:
        return OtherLoad(lambda: self.taken, clock=lambda: self.now, own=lambda: self.own)


def test_the_load_is_read_now_and_then_and_never_over_a_pause(tmp_path: Path) -> None:
    machine = Machine()
    rule = LoadRule(read_cpu_share(make_machine(tmp_path, 2), range(2)), machine.load(), machine.now)
    assert rule.threads(machine.pass_time(WINDOW / 2, others=2, own=2)) == 2
    assert rule.threads(machine.pass_time(WINDOW / 2, others=1, own=1)) == 1
    machine.pass_time(STALE, others=2)  # no steps: what others took is no word on now
    assert rule.threads(machine.now) == 2
    assert rule.threads(machine.pass_time(WINDOW, others=1, own=1)) == 1
    assert rule.threads(machine.pass_time(WINDOW, others=0, own=1)) == 1
    assert rule.threads(machine.pass_time(WINDOW, others=0, own=1)) == 2


def test_proc_stat_counts_our_processors_only(tmp_path: Path) -> None:
    root = make_machine(tmp_path, 8)
    share = read_cpu_share(root, {2, 3})
    counter = find_counter(share, root)
    assert counter is not None
    before = counter()
    set_busy(root, {cpu: 10.0 if cpu > 2 else 0.0 for cpu in range(8)})
    assert counter() - before == pytest.approx(10.0)
    assert [type(rule) for rule in thread_rules(share, root)] == [LoadRule]
    load = OtherLoad(counter)
    (root / "proc/stat").unlink()
    assert load.read() is None


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_account_of_its_cgroup_counts(version: int, tmp_path: Path) -> None:
    root = make_machine(tmp_path, 64, cgroup="0::/\n" if version == 2 else "2:cpuacct:/c\n1:cpu:/c\n")
    groups = root / "sys/fs/cgroup"
    if version == 2:
        write(groups / "cpu.max", "200000 100000\n")
        usage, text = groups / "cpu.stat", "usage_usec {:.0f}\nuser_usec 5\n"
    else:
        write(groups / "cpu/c/cpu.cfs_quota_us", "200000\n")
        write(groups / "cpu/c/cpu.cfs_period_us", "100000\n")
        usage, text = groups / "cpuacct/c/cpuacct.usage", "{:.0f}000\n"
    write(usage, text.format(5e6))
    share = read_cpu_share(root, range(64))
    counter = find_counter(share, root)
    assert share.most_threads == 2
    assert counter is not None
    set_busy(root, dict.fromkeys(range(64), 50.0))  # the host is busy: no matter
    assert counter() == pytest.approx(5.0)
    write(usage, text.format(7.5e6))
    assert counter() == pytest.approx(7.5)
    assert [type(rule) for rule in thread_rules(share, root)] == [LoadRule, StepTimeRule]


def test_without_counters_step_times_decide(tmp_path: Path) -> None:
    share = read_cpu_share(tmp_path, range(4))  # no /proc
    assert [type(rule) for rule in thread_rules(share, tmp_path)] == [StepTimeRule]
    write(tmp_path / "proc/stat", "cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")  # a sandbox
    assert [type(rule) for rule in thread_rules(share, tmp_path)] == [StepTimeRule]


def share_of_steps(
    rule: StepTimeRule, step: Callable[[int], float], steps: int, threads: int, tokens: int = 1
) -> float:
    """The part of `steps` steps that ran with `threads`."""
    count = 0
    for _ in range(steps):
        chosen = rule.threads(0.0)
        count += chosen == threads
        rule.took(chosen, tokens, step(chosen))
    return count / steps


def test_step_times_find_the_number_of_threads() -> None:
    noise = random.Random(5)

    def quiet(threads: int) -> float:
        return {2: 9.0, 1: 15.0}[threads] * noise.uniform(0.97, 1.15)

    def busy(threads: int) -> float:
        return noise.uniform(25.0, 60.0) if threads == 2 else 15.0 * noise.uniform(0.97, 1.2)

    rule = StepTimeRule(2)
    assert share_of_steps(rule, quiet, 300, 2) > 0.95
    assert share_of_steps(rule, busy, 10, 1) > 0.5  # two slow steps are enough
    assert share_of_steps(rule, busy, 300, 1) > 0.9
    share_of_steps(rule, quiet, 2 * LONGEST_WAIT, 2)
    assert share_of_steps(rule, quiet, 300, 2) > 0.95
    assert share_of_steps(StepTimeRule(2), busy, 300, 1) > 0.9  # busy from the first step on
    assert share_of_steps(StepTimeRule(1), lambda _: 15.0, 50, 1) == 1.0


def test_step_times_on_a_large_machine() -> None:
    rule = StepTimeRule(64)
    assert share_of_steps(rule, lambda threads: 1 + 64 / threads, 300, 64) > 0.95
    share_of_steps(rule, lambda threads: 64 / threads if threads <= 16 else 40.0, 200, 16)
    assert share_of_steps(rule, lambda threads: 64 / threads if threads <= 16 else 40.0, 300, 16) > 0.9


def test_steps_of_other_sizes_are_not_compared() -> None:
    rule = StepTimeRule(2)
    for tokens in (1, 500, 1, 64, 1, 300) * 20:
        assert rule.threads(0.0) == 2
        rule.took(2, tokens, 9.0 + tokens)


def test_steps_that_another_rule_decided_say_nothing() -> None:
    rule = StepTimeRule(2)
    for _ in range(100):
        assert rule.threads(0.0) == 2
        rule.took(1, 1, 15.0)


class Says:
    """A rule that says these numbers, one after the other."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.seen: list[tuple[int, int]] = []

    def threads(self, now: float) -> int:
        return self.numbers.pop(0)

    def took(self, threads: int, tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((threads, tokens))


def test_the_least_of_all_rules_counts_and_is_set_only_when_it_changes() -> None:
    first, second, calls = Says(4, 4, 3, 9), Says(4, 2, 2, 8), []
    governor = ThreadGovernor(4, [first, second], calls.append)
    for tokens in range(4):
        governor.begin_step()
        governor.end_step(tokens)
    assert calls == [2, 4]
    assert first.seen == second.seen == [(4, 0), (2, 1), (2, 2), (4, 3)]


def test_a_number_that_was_asked_for_stays() -> None:
    governor = ThreadGovernor(3, [], lambda _: pytest.fail("changed"))
    governor.begin_step()
    governor.end_step(1)
    assert governor.num_threads == 3
