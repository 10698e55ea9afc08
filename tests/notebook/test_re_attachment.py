"""Engines that were kept alive and cannot be taken up: a line says so, and the extension is loaded all the same."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from llmkernel.client.kept_engines import kept_engines
from llmkernel.config import EngineArgs
from llmkernel.engine.control_server import ControlServer
from llmkernel.engine.ownership import Ownership
from llmkernel.notebook.kernel_life import KernelLife
from llmkernel.notebook.re_attachment import re_attach
from llmkernel.notebook.session import Session
from llmkernel.protocol.handshake import EngineAddresses, EngineHandshakeMetadata
from llmkernel.protocol.private_file import write_private
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import RunDirectory


class Shell:
    """A shell with a kernel, and what was shown in its cell."""

    def __init__(self) -> None:
        self.kernel = type("Kernel", (), {})()
        self.kernel.parent = SimpleNamespace(connection_file="/run/kernel-1.json")
        self.shown: list[str] = []
        self.display_pub = SimpleNamespace(publish=self._publish)

    def _publish(self, data: dict[str, Any], **_: Any) -> None:
        self.shown.append(data["text/plain"])


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="llmk-test-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr("llmkernel.protocol.run_directory._candidates", lambda: [Path(folder)])
        yield Path(folder)


def leave_behind(run: RunDirectory, kernel: str, pid: int, name: str = "left") -> None:
    """What an engine leaves in its run directory for the next kernel."""
    args = EngineArgs(model="fake:", keep_alive="10m")
    init = EngineHandshakeMetadata(EngineAddresses([], []), args)
    write_private(run.file("init"), msgspec.msgpack.encode(init))
    RunCard(pid, 1, "fake:", time.time(), kernel=kernel, name=name).write(run)


def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


@pytest.mark.usefixtures("base")
async def test_an_engine_that_has_just_ended(capsys: pytest.CaptureFixture[str]) -> None:
    shell, session = Shell(), Session()
    life = KernelLife(shell)
    with RunDirectory() as run:
        leave_behind(run, life.identity, ended_pid())
        re_attach(shell, session, life)
    said = capsys.readouterr().out
    assert said.startswith("left was kept alive, and cannot be re-attached: The engine (process ")
    assert (shell.shown, session.models) == ([], {})


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("base")
async def test_an_engine_that_will_not_have_us(other: "subprocess.Popen[bytes]") -> None:
    """Nothing is ended: not the engine, nor its run."""
    shell, session = Shell(), Session()
    life = KernelLife(shell)
    with RunDirectory() as run:
        owned = Ownership(os.getpid(), keep_alive=None)
        server = ControlServer(run.address("ctl"), Refusing(owned), owned)  # type: ignore[arg-type]
        server.start()
        leave_behind(run, life.identity, other.pid)
        re_attach(shell, session, life)
        slot = session.models["left"]
        with pytest.raises(Exception, match="not kept alive"):
            await slot.ready()
        assert shell.shown == [
            "Re-attaching to left, which was kept alive.",
            f"Re-attaching to left failed: Could not attach to the engine (process {other.pid}): "
            "This engine is not kept alive; it ends with its owner.",
        ]
        assert (other.poll(), run.path.exists(), session.models) == (None, True, {})
        server.close()


class Refusing:
    """A door that takes no owner."""

    def __init__(self, owned: Ownership) -> None:
        self.attach: Callable[[Any], None] = lambda _: owned.check_vacant()


@pytest.mark.usefixtures("base")
def test_only_engines_of_this_kernel_are_found_oldest_first() -> None:
    with RunDirectory() as first, RunDirectory() as second, RunDirectory() as other, RunDirectory() as torn:
        leave_behind(first, "me", 10, "first")
        leave_behind(second, "me", 11, "second")
        leave_behind(other, "another", 12)
        leave_behind(torn, "me", 13)
        torn.file("init").write_bytes(b"\xc1")
        assert [kept.card.name for kept in kept_engines("me")] == ["first", "second"]
        assert kept_engines("") == []
        assert kept_engines("me")[0].init.engine_args.lease == 600
    assert kept_engines("me") == []
