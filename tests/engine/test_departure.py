"""Departure: however the steps of two ends fall together, a dead owner's run goes, and a living one's stays."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llmkernel.protocol.run_directory import RunDirectory

BEGIN = """
import os, signal, sys, threading, time
from llmkernel.engine.departure import Departure
from llmkernel.engine.owner_process import OwnerProcess

os.setsid()
owner, folder = OwnerProcess(int(sys.argv[1])), sys.argv[2]
departure = Departure(owner, folder)
departure.install_signals()
"""

UNTIL_GONE = """
os.write(1, b"up")
while not owner.gone:
    time.sleep(0.005)
"""

CLEAN_UP = """
begun = threading.Event()

def clean_up():
    begun.set()
    {meanwhile}
    os.write(1, b" clean")

departure.on_exit(clean_up)
"""


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    """Held by us, as by a dying owner's last thread, or by what was forked from it."""
    with TemporaryDirectory(prefix="llmk-test-", dir="/tmp") as base, RunDirectory(base) as run:
        run.file("log").write_text("words")
        yield run


def engine_of_us(code: str, run: RunDirectory) -> "subprocess.CompletedProcess[bytes]":
    """A departing engine whose owner we are; we live."""
    command = [sys.executable, "-c", BEGIN + code, str(os.getpid()), str(run.path)]
    return subprocess.run(command, capture_output=True, timeout=30, check=False)


def engine_of_the_dead(code: str, run: RunDirectory) -> bytes:
    """What a departing engine says whose owner is killed once it is up."""
    start = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid()), sys.argv[2]])\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", start, BEGIN + code, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        said = owner.stdout.read(2)
        owner.kill()
        return said + owner.stdout.read()  # until the engine has ended, too


def test_the_second_guard_waits_for_the_first_ones_clean_up(run: RunDirectory) -> None:
    slowly = CLEAN_UP.format(meanwhile="time.sleep(0.3)  # a slow disk")
    both = "threading.Thread(target=departure.exit, args=(0,)).start()\nbegun.wait()\ndeparture.exit(0)"
    assert engine_of_us(slowly + both, run).stdout == b" clean"


def test_being_asked_to_leave_again_does_not_cut_the_clean_up_short(run: RunDirectory) -> None:
    asked = CLEAN_UP.format(meanwhile="signal.raise_signal(signal.SIGTERM)")
    assert engine_of_us(asked + "departure.exit(3)", run).stdout == b" clean"


@pytest.mark.parametrize("error", ["OSError", "RuntimeError"])
def test_a_clean_up_that_fails_ends_the_process_all_the_same(run: RunDirectory, error: str) -> None:
    fails = f"def clean_up():\n    raise {error}\ndeparture.on_exit(clean_up)\n"
    assert engine_of_us(fails + "departure.exit(3)", run).returncode == 3


def test_a_dead_owners_directory_goes_although_its_lock_is_held(run: RunDirectory) -> None:
    joined = "from llmkernel.protocol.run_directory import RunDirectory\n"
    joined += "departure.on_exit(RunDirectory.join(folder).close)\n"
    assert engine_of_the_dead(joined + UNTIL_GONE + "departure.owner_is_gone()", run) == b"up"
    assert not run.path.exists()


def test_a_dead_owners_directory_goes_although_the_engine_had_not_joined_the_run(run: RunDirectory) -> None:
    assert engine_of_the_dead(UNTIL_GONE + "departure.owner_is_gone()", run) == b"up"
    assert not run.path.exists()


def test_an_engine_that_ends_by_itself_while_its_owner_dies_removes_the_directory(run: RunDirectory) -> None:
    assert engine_of_the_dead(UNTIL_GONE + "departure.exit(1)", run) == b"up"
    assert not run.path.exists()


def test_the_alarm_of_the_owners_death_leaves_time_for_the_clean_up(run: RunDirectory) -> None:
    """It was set long before a guard came to run."""
    late = "\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\n" + CLEAN_UP.format(meanwhile="time.sleep(0.4)")
    assert engine_of_the_dead(UNTIL_GONE + late + "departure.owner_is_gone()", run) == b"up clean"
    assert not run.path.exists()


def test_a_clean_up_that_hangs_is_ended_by_the_system(run: RunDirectory) -> None:
    hangs = CLEAN_UP.format(meanwhile="time.sleep(60)")
    assert engine_of_the_dead(hangs + UNTIL_GONE + "departure.owner_is_gone()", run) == b"up"


def test_a_pipe_that_closes_takes_nothing_from_an_owner_that_lives(run: RunDirectory) -> None:
    joined = "from llmkernel.protocol.run_directory import RunDirectory\n"
    joined += "departure.on_exit(RunDirectory.join(folder).close)\n"
    assert engine_of_us(joined + "departure.owner_is_gone()", run).returncode == 0
    assert Path(run.path, "log").exists()


def test_an_engine_that_is_kept_alive_leaves_the_directory_to_whoever_holds_it(run: RunDirectory) -> None:
    kept = "departure = Departure(None, folder)\n"
    assert engine_of_the_dead(kept + UNTIL_GONE + "departure.exit(0)", run) == b"up"
    assert Path(run.path, "log").exists()
