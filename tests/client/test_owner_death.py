"""The engine never outlives its owner, however that ends, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.client.fake_engine import run_directories, wait_gone
from tests.lifecycle.test_kernel_death import wait_for

GONE = 2.0
"""Seconds in which the engine must be gone."""


class Owner:
    """A running owner_script; `engine` is the pid of its engine."""

    def __init__(self, mode: str, model: str = "fake:step_ms=0", *ways: str, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.client.owner_script", mode, model, *ways],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        )
        try:
            self.engine = int(self.wait_for("engine"))
        except BaseException:
            self.close()
            raise

    def wait_for(self, word: str) -> str:
        """The rest of the next line that begins with `word`."""
        assert self.popen.stdout is not None and self.popen.stderr is not None
        for line in self.popen.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise AssertionError(f"no {word!r}; {self.popen.stderr.read()}")

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    made: list[Owner] = []
    yield made
    for owner in made:
        owner.close()


@pytest.mark.parametrize("mode", ["sync", "async", "thread"])
def test_sigkill_of_the_owner(owners: list[Owner], base: Path, mode: str) -> None:
    owners.append(owner := Owner(mode))
    owner.wait_for("waiting")
    assert len(run_directories(base)) == 1
    owner.popen.kill()
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_sigkill_of_the_owner_while_the_engine_loads(owners: list[Owner], base: Path) -> None:
    owners.append(owner := Owner("loading", "fake:load_ms=60000"))
    while owner.wait_for("stage") != "weights":
        pass
    owner.popen.kill()
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_sigkill_of_the_owner_right_after_the_start(owners: list[Owner], base: Path) -> None:
    """The engine may not even have set its guards."""
    owners.append(owner := Owner("sync"))
    owner.popen.kill()
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_sigkill_of_the_owner_while_tokens_come(owners: list[Owner], base: Path) -> None:
    owners.append(owner := Owner("stepping", "fake:step_ms=200"))
    owner.wait_for("waiting")
    wait_for(base, lambda status: status.running == 1 and status.step_counter > 2)
    owner.popen.kill()
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_sigkill_of_the_owner_during_a_step_of_30_seconds(owners: list[Owner], base: Path) -> None:
    owners.append(owner := Owner("stepping", TEST_EXECUTOR="tests.client.broken_executor:SlowStepExecutor"))
    owner.wait_for("waiting")
    owner.popen.kill()
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


@pytest.mark.parametrize("mode", ["forked", "bare_fork"])
def test_sigkill_of_the_owner_while_a_forked_sibling_holds_the_pipe(owners: list[Owner], base: Path, mode: str) -> None:
    """After bare_fork it holds the run's lock, too."""
    owners.append(owner := Owner(mode))
    sibling = int(owner.wait_for("sibling"))
    try:
        owner.popen.kill()
        wait_gone(owner.engine, GONE)
        assert psutil.pid_exists(sibling)
        assert run_directories(base) == []
    finally:
        os.kill(sibling, signal.SIGKILL)


def test_sigkill_of_the_owner_while_it_ends_its_engine(owners: list[Owner], base: Path) -> None:
    """As by a server that interrupts a load, and restarts the kernel at once. The engine has been asked to leave."""
    owners.append(owner := Owner("leaving"))
    while run_directories(base):
        time.sleep(0.005)  # nothing tells of a directory that goes
    owner.popen.kill()
    os.kill(owner.engine, signal.SIGCONT)
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_an_engine_whose_python_cannot_run_is_ended_by_the_system(owners: list[Owner]) -> None:
    """The main thread holds the GIL in a C call that never ends: only the kernel's signals get through."""
    executor = "tests.client.broken_executor:GilHoldingExecutor"
    owners.append(owner := Owner("stepping", TEST_EXECUTOR=executor))
    owner.wait_for("waiting")
    engine = psutil.Process(owner.engine)
    busy = engine.cpu_times().user + 0.2
    while engine.cpu_times().user < busy:
        time.sleep(0.005)  # until it spins
    owner.popen.kill()
    wait_gone(owner.engine, GONE)


@pytest.mark.parametrize(("mode", "code"), [("exit", 0), ("async_exit", 0), ("os_exit", 3), ("raise", 1)])
def test_however_the_owner_leaves(owners: list[Owner], base: Path, mode: str, code: int) -> None:
    started = time.monotonic()
    owners.append(owner := Owner(mode))
    assert owner.popen.wait(20) == code, time.monotonic() - started
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []
    assert owner.popen.stderr is not None
    said = owner.popen.stderr.read()
    assert ("SystemError" in said) if mode == "raise" else said == ""


@pytest.mark.parametrize(("way", "code"), [("exit", 0), ("os_exit", 3)])
def test_however_the_owner_leaves_while_the_engine_loads(owners: list[Owner], base: Path, way: str, code: int) -> None:
    owners.append(owner := Owner("loading", "fake:load_ms=60000", way))
    assert owner.popen.wait(20) == code
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


@pytest.mark.parametrize(("way", "code"), [("exit", 0), ("os_exit", 3), ("raise", 1)])
@pytest.mark.parametrize("stage", ["decode", "forward"])
def test_however_the_owner_leaves_while_the_engine_steps(
    owners: list[Owner], base: Path, stage: str, way: str, code: int
) -> None:
    owners.append(owner := Owner("stepping", f"fake:step_ms={200 if stage == 'decode' else 30_000}", way))
    owner.wait_for("waiting")
    if stage == "decode":
        wait_for(base, lambda status: status.running == 1 and status.step_counter > 2)
    else:
        wait_for(base, lambda status: status.step_age > 0.1)
    assert owner.popen.stdin is not None
    owner.popen.stdin.write("now\n")
    owner.popen.stdin.flush()
    assert owner.popen.wait(20) == code
    wait_gone(owner.engine, GONE)
    assert run_directories(base) == []


def test_a_forked_child_neither_ends_nor_uses_the_engine(owners: list[Owner], base: Path) -> None:
    owners.append(owner := Owner("fork_child_exits"))
    assert "belongs to process" in owner.wait_for("child:")
    assert "belongs to process" in owner.wait_for("child:")
    assert owner.wait_for("child shutdown:") == "0"
    assert owner.wait_for("parent:") == "False"
    assert len(run_directories(base)) == 1
    assert psutil.pid_exists(owner.engine)


def test_an_interrupt_of_the_owners_group_does_not_reach_the_engine(owners: list[Owner]) -> None:
    """What jupyter_client does on Interrupt: SIGINT to the process group."""
    owners.append(owner := Owner("sync"))
    owner.wait_for("waiting")
    assert os.getpgid(owner.engine) != os.getpgid(owner.popen.pid)
    os.kill(owner.engine, signal.SIGINT)
    assert psutil.Process(owner.engine).status() != psutil.STATUS_ZOMBIE
    assert owner.popen.stdin is not None
    owner.popen.stdin.close()
    assert owner.popen.wait(20) == 0
    wait_gone(owner.engine, GONE)


def test_what_a_dead_run_left_is_swept_at_the_next_start(owners: list[Owner], base: Path) -> None:
    owners.append(first := Owner("sync"))
    first.wait_for("waiting")
    os.kill(first.engine, signal.SIGKILL)
    first.popen.kill()
    wait_gone(first.engine, GONE)
    first.close()
    assert len(run_directories(base)) == 1
    owners.append(second := Owner("sync"))
    second.wait_for("waiting")
    assert len(run_directories(base)) == 1
    second.popen.stdin.close()  # type: ignore[union-attr]
    assert second.popen.wait(20) == 0
    assert run_directories(base) == []
