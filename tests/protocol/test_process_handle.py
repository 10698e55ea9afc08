"""A process that is watched by a pidfd, or where there are none by its pid and start time."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from llmkernel.protocol import process_handle
from llmkernel.protocol.process_handle import ProcessHandle


@pytest.fixture(params=["pidfd", "start time"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "start time":
        monkeypatch.delattr(os, "pidfd_open")
    return str(request.param)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as made:
        yield made
        made.kill()


def test_it_is_there_until_it_ends_and_a_zombie_has_ended(way: str, process: "subprocess.Popen[bytes]") -> None:
    with ProcessHandle(process.pid) as handle:
        assert (handle.descriptor is not None) == (way == "pidfd")
        assert not handle.ended and not handle.wait(0.01)
        handle.kill()
        assert handle.wait(5) and handle.ended
        process.wait()
        with pytest.raises(ProcessLookupError):
            ProcessHandle(process.pid)
        handle.terminate()  # nobody is there


@pytest.mark.parametrize("pid", [0, -1, 2**40])
@pytest.mark.usefixtures("way")
def test_what_is_no_pid(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessHandle(pid)


def test_a_later_process_of_the_same_pid_is_another_one(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with ProcessHandle(process.pid) as handle:
        later = process_handle._start_time(process.pid) + 1
        monkeypatch.setattr(process_handle, "_start_time", lambda _: later)
        assert handle.ended
        handle.kill()
        assert process.poll() is None


@pytest.mark.usefixtures("way")
def test_where_there_is_no_sigkill(process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGKILL")
    with ProcessHandle(process.pid) as handle:
        handle.kill()
        assert handle.wait(5)
    assert process.wait() == -signal.SIGTERM
    monkeypatch.undo()
