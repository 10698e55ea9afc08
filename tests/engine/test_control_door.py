"""The control channel of a real engine process: it works while the engine loads, steps, and leaves."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from llmkernel.client.control_client import ControlClient
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.control import FIRST_ATTACHED, Attach
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.requests import EngineCoreRequestType
from llmkernel.protocol.transport import make_zmq_socket
from tests.client.fake_engine import make_async_client
from tests.engine.raw_engine import ENGINE, RawEngine, make_request


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    with RawEngine("fake:step_ms=1,num_blocks=600,max_model_len=4000") as engine:
        yield engine


@pytest.fixture
def control(engine: RawEngine) -> Iterator[ControlClient]:
    with ControlClient(engine.run.address("ctl")) as control:
        yield control


class Guest:
    """The two sockets of a client that attaches, spoken to like the owner's."""

    def __init__(self, engine: RawEngine, name: str = "0a0b0c") -> None:
        place = engine.run.path
        self.question = Attach(f"ipc://{place}/i{name}", f"ipc://{place}/o{name}", os.getpid())
        engine.inputs.append(make_zmq_socket(engine.ctx, self.question.input, zmq.ROUTER, linger=0))
        engine.outputs.append(make_zmq_socket(engine.ctx, self.question.output, zmq.PULL, linger=0))
        self.at = len(engine.inputs) - 1

    def registration(self, engine: RawEngine) -> list[bytes]:
        assert engine.inputs[self.at].poll(5000)
        return engine.inputs[self.at].recv_multipart()


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again; each question takes its time."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "never so"


def wait_for_clients(control: ControlClient, *indices: int) -> None:
    until(lambda: [client.client_index for client in control.status().clients] == list(indices))


def test_an_attached_client_hears_the_registration_and_its_own_outputs_only(
    engine: RawEngine, control: ControlClient
) -> None:
    guest = Guest(engine)
    index = control.attach(guest.question).client_index
    assert index == FIRST_ATTACHED
    assert control.attach(guest.question).client_index == index  # asked again: the first answer was lost
    identity, registration = guest.registration(engine)
    assert identity == ENGINE and b"max_model_len" in registration
    engine.add("mine", [1], max_tokens=20)
    request = make_request("guest's", [2], index, max_tokens=20)
    engine.send(EngineCoreRequestType.ADD, request, guest.at)
    assert engine.tokens("mine") == fake_answer([1], 20)
    assert engine.tokens("guest's", guest.at) == fake_answer([2], 20)
    engine.send(EngineCoreRequestType.UTILITY, (index, 7, "is_sleeping", []), guest.at)
    assert engine.receive(guest.at).utility_output.result.result is False  # type: ignore[union-attr]
    second = Guest(engine, "0a0b0d")
    assert control.attach(second.question).client_index == index + 1
    control.detach(index)
    wait_for_clients(control, 0, index + 1)
    assert not Path(guest.question.input.removeprefix("ipc://")).exists()


def test_detaching_ends_what_the_client_had_asked(engine: RawEngine, control: ControlClient) -> None:
    guest = Guest(engine)
    index = control.attach(guest.question).client_index
    guest.registration(engine)
    for number in range(3):
        engine.send(EngineCoreRequestType.ADD, make_request(f"g{number}", [2], index, max_tokens=3900), guest.at)
    engine.receive(guest.at)
    engine.add("mine", [1], max_tokens=300)
    control.detach(index)
    assert engine.tokens("mine") == fake_answer([1], 300)
    stats = engine.wait_until(lambda stats: not stats["num_running_reqs"])
    assert stats["num_free_blocks"] == stats["num_blocks"]
    engine.send(EngineCoreRequestType.ADD, make_request("late", [2], index, max_tokens=3), 0)
    engine.add("next", [3], max_tokens=3)
    assert engine.tokens("next") == fake_answer([3], 3)
    assert "there is no such client" in engine.process.log_tail()


def test_what_cannot_be_is_refused(engine: RawEngine, control: ControlClient, tmp_path: Path) -> None:
    place = engine.run.path
    good = f"ipc://{place}/o123456"
    for bad in (
        f"ipc://{place}/in0",
        f"ipc://{place}/ctl",
        f"ipc://{place}/../i123456",
        f"ipc://{tmp_path}/i123456",
        f"ipc://{place}/i12345G",
        "tcp://10.1.2.3:4567",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:*",
        "inproc://x",
        "",
    ):
        with pytest.raises(InvalidRequestError, match=r"six hexadecimal digits, or a port of 127\.0\.0\.1"):
            control.attach(Attach(bad, good, os.getpid()))
    for index in (0, 3, FIRST_ATTACHED, -1):
        with pytest.raises(InvalidRequestError, match="is not attached"):
            control.detach(index)
    assert [client.client_index for client in control.status().clients] == [0]


def test_ping_and_abort_beside_a_forward() -> None:
    """They are answered at once; the request ends with the forward, and brings nothing from it."""
    with RawEngine("fake:step_ms=800") as engine, ControlClient(engine.run.address("ctl")) as control:
        engine.add("a", max_tokens=100)
        until(lambda: control.ping().step_age > 0)
        assert control.ping().step_counter <= 1
        started = time.monotonic()
        control.abort(["unknown", "a"])
        assert control.ping().step_age > 0
        assert control.status().running == 1
        assert time.monotonic() - started < 0.5
        (output,) = engine.collect("a")["a"]
        assert output.finish_reason is FinishReason.ABORT and output.new_token_ids == []
        engine.wait_until(lambda stats: stats["num_free_blocks"] == stats["num_blocks"])


def test_abort_soon_does_not_wait(engine: RawEngine, control: ControlClient) -> None:
    engine.add("a", max_tokens=3900)
    engine.receive()
    control.abort_soon(["a"])
    assert engine.collect("a")["a"][-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("stage", ["loading", "idle", "step"])
def test_shutdown_ends_the_engine_at_every_stage(stage: str) -> None:
    if stage == "loading":
        client = make_async_client("fake:load_ms=60000")
        process, address = client.process, client.running_engine.control_address
    else:
        engine = RawEngine("fake:step_ms=30000")
        process, address = engine.process, engine.run.address("ctl")
    with ControlClient(address) as control:
        if stage == "loading":
            until(lambda: (stage := control.status().stage) is not None and stage.stage == "weights")
            status = control.status()
            assert status.state == "starting"
            assert (status.model, status.owner_pid) == ("fake:load_ms=60000", os.getpid())
        elif stage == "step":
            engine.add("a")
            until(lambda: control.ping().step_age > 0)
        started = time.monotonic()
        control.shutdown()
        assert process.wait(2)
        assert time.monotonic() - started < 1
        assert process.exitcode == 0
        with pytest.raises(EngineDeadError):
            control.ping(0.1)
    if stage == "loading":
        client.shutdown()
    else:
        engine.close()


def test_garbage_on_the_control_channel_is_logged_and_ignored(engine: RawEngine, control: ControlClient) -> None:
    path = str(engine.run.file("ctl"))
    for raw in (b"", b"\x00" * 10_000, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.connect(path)
            hostile.sendall(raw)
    with zmq.Context() as ctx, ctx.socket(zmq.DEALER) as hostile:
        hostile.connect(f"ipc://{path}")
        for frames in ([b""], [b"", b""], [b"n", os.urandom(500)], [b"n", b"\x81\xa3ask\xa5NEVER"], [b"x"] * 9):
            hostile.send_multipart(frames)
        assert control.ping() is not None
        until(lambda: control.status().state == "running")  # what registers first opens its door a moment later
        until(lambda: control.ping() and "Ignored a malformed question" in engine.process.log_tail())
    assert psutil.Process(engine.process.pid).is_running()
