"""The control channel: every question, answered beside a busy engine, and nothing that bytes can break."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from llmkernel.client.control_client import ControlClient, EngineStuckError
from llmkernel.engine.control_server import ControlServer
from llmkernel.engine.ownership import Ownership
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.control import Attach, EngineStatus, Ping, Pong


class Door:
    """An engine as the control channel sees it."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.ended = threading.Event()
        self.detached = threading.Event()

    def pong(self) -> Pong:
        return Pong(7, 0.5)

    def status(self) -> EngineStatus:
        return EngineStatus(
            pid=1, owner_pid=2, model="m", state="running", stage=None, uptime=3.0, memory=4, running=5, waiting=6,
            step_counter=7, step_age=0.5, clients=[], log="/log",
        )  # fmt: skip

    def abort(self, request_ids: list[str]) -> None:
        self.done.append(request_ids)

    def attach(self, client: Attach) -> int:
        if not client.input.startswith("ipc://"):
            raise ValueError("input must be in the run directory.")
        return 3

    def detach(self, client_index: int) -> None:
        self.done.append(client_index)
        self.detached.set()

    def starter_is_gone(self) -> None:
        self.done.append("starter")

    def keep_alive(self, seconds: float) -> None:
        self.done.append(seconds)

    def shutdown(self) -> None:
        self.ended.set()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/ctl"


@pytest.fixture
def door(address: str) -> Iterator[Door]:
    door = Door()
    server = ControlServer(address, door, Ownership(os.getpid()))
    server.start()
    yield door
    server.close()


@pytest.fixture
def client(address: str) -> Iterator[ControlClient]:
    with ControlClient(address) as client:
        yield client


def test_every_question_has_its_answer(door: Door, client: ControlClient) -> None:
    assert client.ping() == Pong(7, 0.5)
    assert client.status() == door.status()
    client.abort(["a", "b"])
    client.detach(3)
    assert door.done == [["a", "b"], 3]
    assert client.attach(Attach("ipc:///x/in1", "ipc:///x/out1", os.getpid())).client_index == 3
    client.shutdown()
    assert door.ended.wait(5)


def test_what_cannot_be_is_refused_with_its_reason(door: Door, client: ControlClient) -> None:
    with pytest.raises(InvalidRequestError, match="must be in the run directory"):
        client.attach(Attach("tcp://10.0.0.1:1", "ipc:///x", os.getpid()))
    for pid in (0, -5, 2**40, ended_pid()):
        with pytest.raises(InvalidRequestError, match=f"pid = {pid}: there is no such process"):
            client.attach(Attach("ipc:///x/in1", "ipc:///x/out1", pid))
    assert door.done == [3, 3, 3, 3]  # what had been attached is detached


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_client_whose_process_ends_is_detached(
    door: Door, client: ControlClient, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client.attach(Attach("ipc:///x/in1", "ipc:///x/out1", process.pid))
    assert client.ping() and door.done == []
    process.kill()
    assert door.detached.wait(5)
    assert door.done == [3]
    process.communicate()


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_many_threads_ask_at_once(door: Door, client: ControlClient) -> None:
    answers: list[Pong] = []
    threads = [threading.Thread(target=lambda: answers.append(client.ping())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [Pong(7, 0.5)] * 16


@pytest.mark.parametrize(
    "frames", [[b"x"], [b"1", b"\xff\xff"], [b"1", b"\x80"], [b"1", b"", b"3"], [b"1", b"\x91" * 5000]]
)
def test_garbage_is_dropped_and_the_next_question_answered(
    door: Door, client: ControlClient, address: str, frames: list[bytes]
) -> None:
    with zmq.Context() as ctx, ctx.socket(zmq.DEALER) as hostile:
        hostile.connect(address)
        hostile.send_multipart(frames)
        hostile.send_multipart([b"n", msgspec.msgpack.encode(Ping())])
        number, answer = hostile.recv_multipart()
    assert number == b"n" and msgspec.msgpack.decode(answer)["answer"] == "PONG"


def test_an_engine_that_does_not_answer_is_stuck(client: ControlClient) -> None:
    with pytest.raises(EngineStuckError, match="has not answered"):
        client.ping(timeout=0.1)
