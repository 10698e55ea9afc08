"""The start-up without sockets: every order of messages, and everything that is no message."""

import msgspec
import pytest

from llmkernel.client.startup import Startup, StartupState
from llmkernel.config import EngineArgs
from llmkernel.protocol.handshake import (
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    Hello,
    ModelFacts,
    Progress,
    Ready,
    StartupFailed,
    TokenizerFacts,
)

ME = b"\x00\x00"
INIT = EngineHandshakeMetadata(EngineAddresses(["ipc:///i"], ["ipc:///o"]), EngineArgs(model="fake:"))
FACTS = EngineCoreReadyResponse(
    version="1",
    max_model_len=8,
    num_gpu_blocks=4,
    block_size=2,
    max_num_seqs=1,
    max_num_batched_tokens=8,
    model=ModelFacts("m", "s", "a", "i", "d", "cpu", 10, 8),
    tokenizer=TokenizerFacts(),
)


def frames(message: object, identity: bytes = ME) -> list[bytes]:
    return [identity, msgspec.msgpack.encode(message)]


@pytest.fixture
def startup() -> Startup:
    return Startup(ME, INIT)


@pytest.mark.row("A-139")
def test_the_usual_order(startup: Startup) -> None:
    seen: list[Progress] = []
    startup.add_progress_callback(seen.append)
    assert startup.state is StartupState.NEW
    reply = startup.handshake_message(frames(Hello(pid=5)))
    assert reply is not None and reply[0] == ME
    assert msgspec.msgpack.decode(reply[1], type=EngineHandshakeMetadata) == INIT
    assert startup.handshake_message(frames(Progress("weights", 1, 4))) is None
    startup.registration_message(frames(FACTS))
    assert startup.state is StartupState.CONNECTED
    startup.handshake_message(frames(Ready()))
    assert startup.done
    assert startup.response == FACTS
    assert [progress.stage for progress in seen] == ["weights", "ready"]


@pytest.mark.row("A-040")
def test_an_old_peer_registers_with_nothing(startup: Startup) -> None:
    startup.handshake_message(frames(Hello(pid=5)))
    startup.handshake_message(frames(Ready()))
    assert startup.state is StartupState.STARTED
    startup.registration_message([ME, b""])
    assert startup.done and startup.response is not None and startup.response.version == ""


def test_an_engine_of_somebody_else_only_registers() -> None:
    startup = Startup(ME, None)
    assert not startup.needs_handshake
    startup.registration_message(frames(FACTS))
    assert startup.done


def test_a_failure_is_kept_and_ends_the_start(startup: Startup) -> None:
    startup.handshake_message(frames(Hello(pid=5)))
    startup.handshake_message(frames(StartupFailed("ValueError", "no", "Traceback")))
    assert startup.over and not startup.done
    assert startup.reported is not None and startup.reported.message == "no"
    startup.handshake_message(frames(Ready()))
    assert not startup.done


@pytest.mark.parametrize(
    "message",
    [
        [],
        [ME],
        [ME, b""],
        [ME, b"\xc1"],
        [ME, b"\x80", b""],
        frames(Ready()),
        frames(Progress("weights")),
        frames(StartupFailed("a", "b", "c")),
        frames(Hello(pid=1), identity=b"other"),
        frames(Hello(pid=1, local=False)),
        frames(Hello(pid=1, headless=True)),
        frames({"status": "HELLO", "pid": "text"}),
    ],
)
def test_what_makes_no_sense_changes_nothing(startup: Startup, message: list[bytes]) -> None:
    assert startup.handshake_message(message) is None
    assert startup.state is StartupState.NEW
    assert startup.handshake_message(frames(Hello(pid=5))) is not None


def test_a_second_hello_and_a_second_registration_are_ignored(startup: Startup) -> None:
    startup.handshake_message(frames(Hello(pid=5)))
    assert startup.handshake_message(frames(Hello(pid=6))) is None
    startup.registration_message(frames(FACTS, identity=b"zz"))
    startup.registration_message([ME, b"\xc1"])
    startup.registration_message([ME])
    startup.registration_message(frames(FACTS))
    startup.registration_message([ME, b""])
    startup.handshake_message(frames(Ready()))
    assert startup.response == FACTS


def test_a_late_listener_hears_the_latest_and_a_broken_one_harms_nobody(startup: Startup) -> None:
    startup.progress(Progress("weights", 1, 2))
    late: list[Progress] = []
    startup.add_progress_callback(lambda progress: 1 / 0)
    startup.add_progress_callback(late.append)
    startup.progress(Progress("weights", 2, 2))
    assert [progress.done for progress in late] == [1, 2]
