"""Where sockets cannot be files: ports of this machine, each protected by the key of its run (design D17)."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.control_client import ControlClient, EngineStuckError, pack_question
from llmkernel.client.running_engines import find_engine, stop_engine
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError
from llmkernel.protocol.control import Attach, Status
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.run_directory import RunDirectory, RunDirectoryError
from llmkernel.protocol.transport import bound_address, make_zmq_socket
from tests.client.fake_engine import collect_sync, make_request, make_sync_client, run_directories, tokens, wait_gone


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMKERNEL_TRANSPORT", "tcp")


@pytest.fixture
def client(base: Path) -> Iterator[SyncMPClient]:
    made = make_sync_client("fake:step_ms=0.5,num_blocks=600,max_model_len=4000")
    try:
        made.ready()
        yield made
    finally:
        made.shutdown()


def engine_of(client: SyncMPClient) -> RunningEngine:
    assert client.running_engine is not None
    return client.running_engine


def test_every_socket_is_a_port_and_the_key_is_told_to_nobody_else(client: SyncMPClient) -> None:
    engine = engine_of(client)
    key = engine.key
    assert key is not None
    for path in engine.run_path.iterdir():
        assert stat.S_ISREG(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) == 0o600, path.name
    process = psutil.Process(engine.pid)
    told = [*process.cmdline(), *process.environ(), *process.environ().values(), repr(key)]
    assert not [word for word in told if key.secret.decode() in word]
    assert engine.control_address.startswith("tcp://127.0.0.1:")
    for found in psutil.Process(engine.pid).net_connections("tcp"):
        assert found.laddr.ip == "127.0.0.1"


def test_an_owner_and_guests_are_served_as_over_files(client: SyncMPClient, base: Path) -> None:
    engine = engine_of(client)
    assert find_engine(engine.pid) == engine
    guest = SyncMPClient(client.args, engine=find_engine(engine.pid))
    guest.ready()
    for who, name in ((client, "owner"), (guest, "guest")):
        who.add_request(make_request(name, [1], max_tokens=500))
    assert tokens(collect_sync(client, "owner")["owner"]) == fake_answer([1], 500)
    assert tokens(collect_sync(guest, "guest")["guest"]) == fake_answer([1], 500)
    with engine.control() as control:
        assert [each.client_index for each in control.status().clients] == [0, 1000]
        guest.shutdown()
        deadline = time.monotonic() + 10
        while len(control.status().clients) > 1:
            assert time.monotonic() < deadline
    assert stop_engine(engine) > 0
    with pytest.raises(EngineDeadError, match="stopped from outside"):
        while client.get_output():
            pass
    client.shutdown()
    wait_gone(engine.pid, 1)
    assert run_directories(base) == []


def test_who_does_not_hold_the_key_gets_nowhere(client: SyncMPClient) -> None:
    """Neither to the engine's port nor to the owner's; not without a key, not with another one."""
    engine = engine_of(client)
    addresses = [engine.control_address, bound_address(client.input_socket)]
    for stranger in (None, CurveKey.generate()):
        with ControlClient(engine.control_address, stranger) as control, pytest.raises(EngineStuckError):
            control.status(0.3)
        with zmq.Context() as ctx:
            for address in addresses:
                with make_zmq_socket(
                    ctx, address, zmq.DEALER, bind=False, identity=b"\0\0", key=stranger, linger=0
                ) as own:
                    own.send_multipart(pack_question(Status()))
                    assert not own.poll(200)
    client.add_request(make_request("a", [1], max_tokens=20))
    assert tokens(collect_sync(client, "a")["a"]) == fake_answer([1], 20)


def test_who_poses_as_a_client_is_not_believed(client: SyncMPClient) -> None:
    """The engine connects to what ATTACH names, and finds there somebody without the secret half."""
    engine, stranger = engine_of(client), CurveKey.generate()
    assert engine.key is not None
    with zmq.Context() as ctx, engine.control() as control:
        posing = make_zmq_socket(ctx, "tcp://127.0.0.1:*", zmq.ROUTER, key=CurveKey(engine.key.public, stranger.secret))
        pull = make_zmq_socket(ctx, "tcp://127.0.0.1:*", zmq.PULL, key=CurveKey(engine.key.public, stranger.secret))
        with posing, pull:
            index = control.attach(Attach(bound_address(posing), bound_address(pull), os.getpid())).client_index
            assert not posing.poll(300)  # no registration, with the model's facts in it
            control.detach(index)


def test_a_path_that_is_too_long_for_sockets_means_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLMKERNEL_TRANSPORT")
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setattr("llmkernel.protocol.run_directory._candidates", lambda: [long])
    with RunDirectory() as run:
        assert (run.transport, run.path.parent) == ("tcp", long)
        assert run.address("in0") == "tcp://127.0.0.1:*"
    with pytest.raises(RunDirectoryError, match="short enough"):
        RunDirectory(long)  # asked for by name: the user can name another


def test_keys_are_checked() -> None:
    key = CurveKey.generate()
    assert CurveKey.parse(bytes(key)) == key and len(bytes(key)) == CurveKey.SIZE
    assert key.secret.decode() not in repr(key)
    for wrong in (b"", b"x" * 79, key.public + CurveKey.generate().secret):
        with pytest.raises(ValueError, match="key"):
            CurveKey.parse(wrong)


def test_an_engine_whose_owner_is_gone_before_it_has_told_the_key_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "llmkernel.engine", "--handshake", "tcp://127.0.0.1:1", "--run-dir"]
    command += [str(tmp_path), "--parent-pid", str(os.getpid()), "--key-on-stdin"]
    done = subprocess.run(command, input=b"half of it", capture_output=True, timeout=20)
    assert done.returncode in (0, 1)  # whichever is first: the key that is none, or the end of its owner's pipe
