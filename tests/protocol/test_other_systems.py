"""What is written for systems that are not here, as far as it runs here: locks on bytes, owners by handle, no modes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmkernel.engine import owner_process, parent_watch
from llmkernel.engine.owner_process import OwnerProcess
from llmkernel.protocol import file_lock, run_directory, run_folder
from llmkernel.protocol.file_lock import try_share, try_take
from llmkernel.protocol.run_directory import RunDirectory, live_runs, sweep_dead


class Windows:
    """msvcrt.locking: each open file has its own locks, and sees those of the others."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}  # (file, byte) -> descriptor

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        file, first = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        places = [(file, byte) for byte in range(first, first + count)]
        if mode == self.LK_UNLCK:
            for place in places:
                if self.held.pop(place) != descriptor:
                    raise PermissionError(13, "not locked here")
        elif any(place in self.held for place in places):
            raise PermissionError(13, "locked")
        else:
            self.held |= dict.fromkeys(places, descriptor)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    made = Windows()
    monkeypatch.setattr(file_lock, "fcntl", None)
    monkeypatch.setattr(file_lock, "_windows", made)
    return made


@pytest.fixture
def files(tmp_path: Path) -> list[int]:
    path = tmp_path / "lock"
    path.write_bytes(b"")
    return [os.open(path, os.O_RDWR) for _ in range(3)]


def test_shares_and_a_lock_taken_alone_on_bytes(windows: Windows, files: list[int]) -> None:
    one, two, three = files
    assert try_share(one) and try_share(two)
    assert not try_take(three)
    assert not try_take(one)  # the second one shares it still ...
    assert len(windows.held) == 2  # ... and the first one does, too, after it has tried
    for place, descriptor in list(windows.held.items()):
        if descriptor == two:
            del windows.held[place]  # the system's doing when a process ends
    assert try_take(one)
    assert not try_share(two) and not try_take(three)


def test_the_same_with_the_locks_of_this_system(files: list[int]) -> None:
    one, two, three = files
    assert try_share(one) and try_share(two)
    assert not try_take(three) and not try_take(one)
    os.close(two)
    assert try_take(one) and not try_share(three)


def test_run_directories_where_folders_have_no_modes_and_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_directory, "_WINDOWS", True)
    monkeypatch.setattr(run_folder, "_WINDOWS", True)
    tmp_path.chmod(0o755)
    with RunDirectory(tmp_path) as run:
        assert run.transport == "tcp"
        with RunDirectory.join(run.path, "tcp"):
            assert live_runs(tmp_path) == [run.path]
            assert sweep_dead(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_owner_is_watched_by_its_handle_where_children_keep_their_parents_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_process, "_PARENTS_STAY", True)
    monkeypatch.setattr(parent_watch, "POLL_SECONDS", 0.01)
    gone, polled = threading.Event(), threading.Event()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        handle = OwnerProcess(owner.pid)
        watch = parent_watch.ParentWatch(handle, on_gone=gone.set, on_quit=gone.set, each_poll=polled.set)
        threading.Thread(target=watch._watch_pid, daemon=True).start()
        assert polled.wait(5) and not gone.is_set()
        owner.kill()
        assert gone.wait(5)
    assert OwnerProcess(owner.pid).gone
