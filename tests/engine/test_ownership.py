"""Whose engine it is: owners that go and come, and the lease between them."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from llmkernel.client.control_client import ControlClient
from llmkernel.engine import ownership as module
from llmkernel.engine.control_server import ControlServer
from llmkernel.engine.ownership import STARTER, Ownership
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.control import Attach, EngineStatus, Pong


class Clock:
    """time.monotonic, set by hand; and the system's alarm, which is only written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.alarms: list[float] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "set_alarm", self.alarms.append)


def test_a_lease_runs_between_two_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    owned = Ownership(7, keep_alive=60)
    assert (owned.pid, owned.client_index, owned.vacant, owned.lease_left) == (7, STARTER, False, None)
    with pytest.raises(ValueError, match="has an owner, process 7"):
        owned.check_vacant()
    owned.begin_lease()
    clock.now += 20
    assert owned.vacant and owned.lease_left == 40
    owned.check_vacant()
    owned.take(1000, 8)
    assert (owned.pid, owned.client_index, owned.vacant, owned.lease_left) == (8, 1000, False, None)
    clock.now += 100
    owned.begin_lease()  # whole again
    assert owned.lease_left == 60
    clock.now += 61
    assert owned.lease_left == 0
    assert clock.alarms == [65, 0, 65]


def test_a_lease_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    owned = Ownership(7, keep_alive=60)
    owned.change_lease(0)
    owned.begin_lease()
    assert owned.lease_left == 0
    owned.change_lease(5)
    assert owned.lease_left == 5
    for wrong in (-1, float("nan"), 10**9):
        with pytest.raises(ValueError, match="must be from 0 to"):
            owned.change_lease(wrong)


def test_without_keep_alive_there_is_no_lease() -> None:
    owned = Ownership(7)
    for question in (owned.check_vacant, lambda: owned.change_lease(5)):
        with pytest.raises(ValueError, match="not kept alive"):
            question()


class Door:
    """An engine that writes down what becomes of it."""

    def __init__(self, owned: Ownership) -> None:
        self.owned = owned
        self.ended = threading.Event()
        self.vacant = threading.Event()

    def pong(self) -> Pong:
        return Pong(0, 0.0)

    def status(self) -> EngineStatus:
        raise NotImplementedError

    def abort(self, request_ids: list[str]) -> None: ...

    def attach(self, client: Attach) -> int:
        self.owned.check_vacant()
        self.owned.take(1000, client.pid)
        return 1000

    def detach(self, client_index: int) -> None:
        if client_index == self.owned.client_index:
            self.starter_is_gone()

    def starter_is_gone(self) -> None:
        self.owned.begin_lease()
        self.vacant.set()

    def keep_alive(self, seconds: float) -> None:
        self.owned.change_lease(seconds)

    def shutdown(self) -> None:
        self.ended.set()


def a_process() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


@pytest.mark.parametrize("pidfd", [True, False])
def test_owners_are_watched_and_the_end_of_the_lease_is_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr("llmkernel.engine.peer_watch.POLL_MS", 20)
    monkeypatch.setattr(module, "set_alarm", lambda _: None)
    with a_process() as first, a_process() as second:
        monkeypatch.setattr(os, "getppid", lambda: first.pid)
        owned = Ownership(first.pid, keep_alive=60)
        door = Door(owned)
        server = ControlServer(f"ipc://{tmp_path}/ctl", door, owned)
        server.start()
        with ControlClient(server.address) as client:
            take = Attach("ipc:///i", "ipc:///o", second.pid, owner=True)
            with pytest.raises(InvalidRequestError, match="has an owner"):
                client.attach(take)
            first.kill()
            assert door.vacant.wait(5)
            door.vacant.clear()
            assert client.attach(take).client_index == 1000
            assert owned.lease_left is None
            client.keep_alive(0.1)
            second.send_signal(signal.SIGKILL)
            assert door.vacant.wait(5) and door.ended.wait(5)


def test_an_owner_that_was_gone_before_it_was_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone for good, or its pid another's by now: not our parent."""
    monkeypatch.setattr(module, "set_alarm", lambda _: None)
    with a_process() as other, a_process() as gone:
        gone.kill()
        gone.wait()
        for pid in (gone.pid, other.pid):
            owned = Ownership(pid, keep_alive=0.1)
            door = Door(owned)
            ControlServer(f"ipc://{tmp_path}/{pid}", door, owned).start()
            assert door.vacant.wait(5) and door.ended.wait(5)
        other.kill()
