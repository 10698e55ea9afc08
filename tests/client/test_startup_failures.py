"""A load that fails says why, on one line first, and gives everything back."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.protocol.handshake import Progress
from tests.client.fake_engine import (
    FAKE_EXECUTOR,
    make_async_client,
    make_request,
    make_sync_client,
    run_directories,
    wait_gone,
)


@pytest.mark.row("A-139")
async def test_the_engines_own_exception_is_the_message(base: Path) -> None:
    client = make_async_client("fake:fail_load=1")
    started = time.monotonic()
    with pytest.raises(EngineStartupError) as caught:
        await client.ready()
    assert time.monotonic() - started < 10
    error = caught.value
    assert str(error) == (
        "The engine did not start: RuntimeError: The fake model was told to fail its load; leave fail_load out."
    )
    assert error.remote_type == "RuntimeError"
    assert "fake_executor.py" in error.remote_traceback
    assert "The engine did not start." in error.log_tail
    assert run_directories(base) == []
    wait_gone(client.process.pid, 1)
    with pytest.raises(EngineStartupError, match="fail_load"):
        await client.add_request_async(make_request("a"))
    with pytest.raises(EngineStartupError, match="fail_load"):
        await client.get_output_async()


async def test_a_users_mistake_has_no_class_name_in_front() -> None:
    client = make_async_client("fake:no_such_setting=1")
    with pytest.raises(EngineStartupError, match=r"^The engine did not start: 'no_such_setting=1' is no setting"):
        await client.ready()


@pytest.mark.parametrize(
    ("executor_class", "message"),
    [
        ("llmkernel_nowhere.executor:Executor", "pip install llmkernel_nowhere"),
        ("llmkernel.engine.fake_executor:Nothing", "AttributeError"),
        ("llmkernel.config:EngineArgs", "is not an Executor"),
    ],
)
async def test_an_executor_class_that_cannot_be_had(executor_class: str, message: str) -> None:
    client = AsyncMPClient(EngineArgs(model="fake:"), executor_class)
    with pytest.raises(EngineStartupError, match=message):
        await client.ready()


@pytest.mark.row("A-139", "A-140")
async def test_an_engine_that_is_killed_while_loading(base: Path) -> None:
    client = make_async_client("fake:load_ms=60000")
    loading = asyncio.Event()
    client.add_progress_callback(lambda progress: loading.set() if progress.stage == "weights" else None)
    waiters = [asyncio.create_task(client.ready()) for _ in range(3)]
    adding = asyncio.create_task(client.add_request_async(make_request("a")))
    reading = asyncio.create_task(client.get_output_async())
    await asyncio.wait_for(loading.wait(), 10)
    os.kill(client.process.pid, signal.SIGKILL)
    started = time.monotonic()
    outcomes = await asyncio.gather(*waiters, adding, reading, return_exceptions=True)
    assert time.monotonic() - started < 1
    for outcome in outcomes:
        assert isinstance(outcome, EngineStartupError)
        assert "killed by SIGKILL in stage 'weights'" in str(outcome)
        assert "memory" in str(outcome)
    assert run_directories(base) == []


async def test_shutdown_ends_a_load_at_once(base: Path) -> None:
    client = make_async_client("fake:load_ms=60000")
    loading = asyncio.Event()
    client.add_progress_callback(lambda progress: loading.set() if progress.stage == "weights" else None)
    waiting = asyncio.create_task(client.ready())
    await asyncio.wait_for(loading.wait(), 10)
    pid = client.process.pid
    started = time.monotonic()
    assert client.shutdown() > 0
    assert time.monotonic() - started < 1
    with pytest.raises(EngineStartupError, match="shut down while it was loading"):
        await waiting
    wait_gone(pid, 0.1)
    assert run_directories(base) == []
    with pytest.raises((EngineStartupError, EngineDeadError), match="shut down"):
        await client.ready()


def test_shutdown_from_another_thread_ends_a_blocking_wait_for_a_load(base: Path) -> None:
    client = make_sync_client("fake:load_ms=60000")
    stages: list[Progress] = []
    begun = threading.Event()

    def on_progress(progress: Progress) -> None:
        stages.append(progress)
        if progress.stage == "weights":
            begun.set()

    client.add_progress_callback(on_progress)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            client.ready()
        except EngineStartupError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert begun.wait(10)
    started = time.monotonic()
    client.shutdown()
    waiter.join(2)
    assert not waiter.is_alive()
    assert time.monotonic() - started < 1
    assert "shut down while it was loading" in str(failures[0])
    assert run_directories(base) == []


async def test_a_progress_callback_may_end_the_load(base: Path) -> None:
    client = make_async_client("fake:load_ms=60000")
    client.add_progress_callback(lambda progress: client.shutdown() if progress.stage == "weights" else None)
    with pytest.raises(EngineStartupError, match="shut down while it was loading"):
        await asyncio.wait_for(client.ready(), 10)
    assert run_directories(base) == []


def test_a_progress_callback_may_end_a_blocking_load(base: Path) -> None:
    client = make_sync_client("fake:load_ms=60000")
    client.add_progress_callback(lambda progress: client.shutdown() if progress.stage == "weights" else None)
    with pytest.raises(EngineStartupError, match="shut down while it was loading"):
        client.ready()
    assert run_directories(base) == []


def test_a_sync_client_raises_the_same(base: Path) -> None:
    client = make_sync_client("fake:fail_load=1")
    with pytest.raises(EngineStartupError, match="fail_load") as caught:
        client.ready()
    assert caught.value.remote_type == "RuntimeError"
    killed = SyncMPClient(EngineArgs(model="fake:load_ms=60000"), FAKE_EXECUTOR)
    killed.add_progress_callback(
        lambda progress: os.kill(killed.process.pid, signal.SIGKILL) if progress.stage == "weights" else None
    )
    with pytest.raises(EngineStartupError, match="killed by SIGKILL in stage 'weights'"):
        killed.ready()
    assert run_directories(base) == []


def test_a_constructor_that_fails_gives_everything_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finaliser stands before anything can fail: here, the start of the process."""
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        make_sync_client()
    assert run_directories(base) == []
