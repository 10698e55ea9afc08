"""Who else is on the machine: another user gets nowhere, and garbage on any socket changes nothing."""

import asyncio
import os
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.attachment import RunningEngine
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError
from llmkernel.protocol.outputs import ENGINE_CORE_DEAD
from llmkernel.protocol.run_directory import RunDirectoryError
from tests.client.fake_engine import collect, collect_sync, make_async_client, make_request, tokens

NOBODY = 65534

_TRY_EVERYTHING = """
import os, socket, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
folder, names = {folder!r}, {names!r}
got = []
def attempt(what, call):
    try:
        call()
        got.append(what)
    except PermissionError:
        pass
attempt("list", lambda: os.listdir(folder))
attempt("make", lambda: open(folder + "/mine", "w"))
for name in names:
    attempt("read " + name, lambda: open(folder + "/" + name, "rb").read())
    attempt("join " + name, lambda: socket.socket(socket.AF_UNIX).connect(folder + "/" + name))
    attempt("unlink " + name, lambda: os.unlink(folder + "/" + name))
attempt("rename", lambda: os.rename(folder, folder + "2"))
attempt("signal", lambda: os.kill({engine}, 15))
print(got)
"""


def run_path(client: AsyncMPClient) -> Path:
    assert client.running_engine is not None
    return client.running_engine.run_path


def what_another_user_gets(folder: Path, engine: int) -> tuple[str, str]:
    """stdout and stderr of a process of another user that tries everything on a run directory and its engine."""
    names = sorted(path.name for path in folder.iterdir())
    assert {"ctl", "in0", "out0", "log", "card", "init", "lock"} <= set(names)
    source = _TRY_EVERYTHING.format(nobody=NOBODY, folder=str(folder), names=names, engine=engine)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


async def test_everything_in_the_run_directory_is_ours_alone(client: AsyncMPClient) -> None:
    folder = run_path(client)
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    for path in folder.iterdir():
        status = path.lstat()
        assert status.st_uid == os.geteuid()
        if stat.S_ISREG(status.st_mode):
            assert stat.S_IMODE(status.st_mode) == 0o600, path.name
        else:
            assert stat.S_ISSOCK(status.st_mode), path.name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_can_neither_read_nor_join_nor_disturb(client: AsyncMPClient) -> None:
    assert client.process is not None
    gets = await asyncio.to_thread(what_another_user_gets, run_path(client), client.process.pid)
    assert gets == ("[]\n", "")


async def test_garbage_on_every_socket_changes_nothing(client: AsyncMPClient) -> None:
    """Also on those of a guest; while streams run, and with the very bytes that a death is told by."""
    guest = SyncMPClient(client.args, engine=client.running_engine)
    await asyncio.to_thread(guest.ready)
    sockets = [path for path in run_path(client).iterdir() if path.is_socket()]
    assert len(sockets) == 6  # hs is closed and its file left; in0, out0, ctl, and the guest's two
    dice = random.Random(7)
    for number in range(8):
        await client.add_request_async(make_request(f"o{number}", [number], max_tokens=1500))
        await asyncio.to_thread(guest.add_request, make_request(f"g{number}", [number], max_tokens=1500))
    reading = asyncio.create_task(collect(client, *(f"o{number}" for number in range(8))))
    guests = asyncio.create_task(asyncio.to_thread(collect_sync, guest, *(f"g{number}" for number in range(8))))
    for path in sockets * 3:
        await asyncio.to_thread(pester, path, dice)
    for name, outputs in ((await reading) | (await guests)).items():
        assert tokens(outputs) == fake_answer([int(name[1:])], 1500)
    assert await client.call_utility_async("is_sleeping") is False
    guest.shutdown()


def pester(path: Path, dice: random.Random) -> None:
    """Garbage on the socket `path`: raw bytes, and messages from ZMQ sockets of kinds that do not belong there."""
    for raw in (b"\0" * 5000, b"GET / HTTP/1.1\r\n\r\n", dice.randbytes(2000), b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"):
        with socket.socket(socket.AF_UNIX) as hostile:
            try:
                hostile.connect(str(path))
                hostile.sendall(raw)
            except (ConnectionRefusedError, BrokenPipeError, ConnectionResetError):
                continue  # nobody listens there any more, or it has hung up on us
    kinds = (zmq.DEALER, zmq.PUSH, zmq.REQ, zmq.SUB)
    with zmq.Context() as ctx:
        for kind in kinds:
            with ctx.socket(kind) as hostile:
                hostile.linger = 50
                hostile.connect(f"ipc://{path}")
                if kind == zmq.SUB:
                    continue
                for frames in ([ENGINE_CORE_DEAD, b""], [dice.randbytes(50)], [b"", b"\x93\x01\x02"], [b"\x01"] * 5):
                    try:
                        hostile.send_multipart(frames, zmq.DONTWAIT)
                    except zmq.ZMQError:
                        break  # REQ: it waits for an answer; PUSH: nobody takes it


@pytest.mark.parametrize("how", ["link", "mode", "gone"])
async def test_a_run_directory_that_is_not_private_is_not_attached_to(base: Path, how: str) -> None:
    client = make_async_client()
    try:
        await client.ready()
        engine = client.running_engine
        assert engine is not None
        path = base / "elsewhere"
        if how == "link":
            path.symlink_to(engine.run_path)
        elif how == "mode":
            path.mkdir(mode=0o755)
        other = RunningEngine(path, engine.pid, engine.owner_pid)
        with pytest.raises((RunDirectoryError, EngineDeadError), match=r"is not a folder|has mode 0755|is gone"):
            AsyncMPClient(client.args, engine=other)
    finally:
        client.shutdown()
