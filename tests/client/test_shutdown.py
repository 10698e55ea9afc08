"""Giving back: idempotent, from any thread, at any stage, complete; and costing nothing while idle."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.core_client import make_client
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError
from tests.client.fake_engine import (
    FAKE_EXECUTOR,
    begin,
    collect,
    collect_sync,
    make_async_client,
    make_request,
    make_sync_client,
    num_threads,
    open_descriptors,
    run_directories,
    wait_gone,
)


@pytest.mark.row("A-080")
async def test_shutdown_is_idempotent_and_fails_whoever_waits(base: Path) -> None:
    client = make_async_client("fake:step_ms=0.5,max_model_len=4000,num_blocks=600")
    await client.ready()
    await begin(client, "long", max_tokens=3900)
    pausing = asyncio.create_task(client.call_utility_async("pause_scheduler", "wait"))
    await asyncio.sleep(0)
    pid = client.process.pid
    started = time.monotonic()
    assert client.shutdown() > 2**20
    assert client.shutdown() == client.resources.bytes_given_back
    assert time.monotonic() - started < 1
    with pytest.raises(EngineDeadError, match="was shut down"):
        await pausing
    with pytest.raises(EngineDeadError, match="was shut down"):
        while True:
            await client.get_output_async()
    with pytest.raises(EngineDeadError, match="was shut down"):
        await client.add_request_async(make_request("late"))
    assert not psutil.pid_exists(pid)  # ended and reaped
    assert run_directories(base) == []


async def test_shutdown_from_many_threads_at_once_while_the_loop_turns(base: Path) -> None:
    client = make_async_client()
    await client.ready()
    reading = asyncio.create_task(client.get_output_async())
    await asyncio.sleep(0)
    given_back = await asyncio.gather(*(asyncio.to_thread(client.shutdown) for _ in range(4)))
    assert len(set(given_back)) == 1
    with pytest.raises(EngineDeadError, match="was shut down"):
        await reading
    assert client.resources.input_socket.closed and client.resources.output_socket.closed
    assert run_directories(base) == []


def test_shutdown_after_the_loop_is_closed_and_by_a_thread(base: Path) -> None:
    client = make_async_client()
    asyncio.run(client.ready())  # type: ignore[arg-type]
    pid = client.process.pid
    thread = threading.Thread(target=client.shutdown)
    thread.start()
    thread.join(5)
    assert client.resources.output_socket.closed
    assert not psutil.pid_exists(pid)
    assert run_directories(base) == []


def test_shutdown_of_a_busy_engine_takes_less_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread sits in a step of 30 s."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    client = SyncMPClient(EngineArgs(model="fake:"), "tests.client.broken_executor:SlowStepExecutor")
    client.ready()
    client.add_request(make_request("slow", max_tokens=2))
    started = time.monotonic()
    client.shutdown()
    assert time.monotonic() - started < 1
    assert client.process.exitcode == 0


def test_an_engine_that_does_not_answer_is_killed_in_time() -> None:
    client = make_sync_client()
    client.ready()
    os.kill(client.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    client.shutdown(timeout=0.6)
    assert time.monotonic() - started < 2
    assert client.process.exitcode == -signal.SIGKILL


@pytest.mark.row("A-009")
def test_an_engine_of_a_collected_client_ends(base: Path) -> None:
    client = make_sync_client()
    client.ready()
    pid = client.process.pid
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    assert not psutil.pid_exists(pid)
    assert run_directories(base) == []


@pytest.mark.row("A-036")
def test_twenty_starts_and_stops_leave_nothing(base: Path) -> None:
    """Threads, descriptors, tasks, processes, files: as many after 20 rounds as after the first."""

    async def round_() -> None:
        client = make_async_client()
        await client.ready()
        await client.add_request_async(make_request("a", max_tokens=3))
        await collect(client, "a")
        client.shutdown()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        await asyncio.wait(others, timeout=1) if others else None
        assert all(task.done() for task in others)

    def sync_round() -> None:
        with make_sync_client() as client:
            client.ready()
            client.add_request(make_request("a", max_tokens=3))
            collect_sync(client, "a")

    def count() -> tuple[int, int, int]:
        gc.collect()
        return num_threads(), len(open_descriptors()), len(psutil.Process().children())

    asyncio.run(round_())
    sync_round()
    before = count()
    for _ in range(10):
        asyncio.run(round_())
        sync_round()
    assert count() == before
    assert run_directories(base) == []


def test_a_failed_start_leaves_nothing(base: Path) -> None:
    def round_() -> None:
        with pytest.raises(RuntimeError, match="fail_load"):
            make_sync_client("fake:fail_load=1").ready()

    round_()
    gc.collect()
    before = num_threads(), len(open_descriptors())
    round_()
    gc.collect()
    assert (num_threads(), len(open_descriptors())) == before
    assert run_directories(base) == []


IDLE_SCRIPT = """
import asyncio, os, resource, sys, time
from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.config import EngineArgs
async def main():
    client = AsyncMPClient(EngineArgs(model="fake:"), "llmkernel.engine.fake_executor:FakeExecutor")
    await client.ready()
    await client.call_utility_async("is_sleeping")
    print(client.process.pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    client.shutdown()
asyncio.run(main())
"""


def test_an_idle_client_and_engine_take_no_cpu() -> None:
    """Three seconds of nothing: under 1 % of a core for both together."""
    owner = subprocess.Popen(
        [sys.executable, "-c", IDLE_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None and owner.stdin is not None
        processes = [psutil.Process(owner.pid), psutil.Process(int(owner.stdout.readline()))]

        def spent() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        def wake_ups() -> list[int]:
            return [process.num_ctx_switches().voluntary for process in processes]  # of the main threads

        pause, seconds = threading.Event(), 3.0
        settled = wake_ups()
        while pause.wait(0.2) or settled != (settled := wake_ups()):
            pass
        before = spent()
        pause.wait(seconds)
        assert spent() - before < 0.01 * seconds
        assert wake_ups() == settled
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.wait(10) == 0


def test_with_ends_the_engine(base: Path) -> None:
    with make_client(True, True, EngineArgs(model="fake:"), FAKE_EXECUTOR) as client:
        assert isinstance(client, AsyncMPClient)
        pid = client.process.pid
    wait_gone(pid, 0.1)
    assert run_directories(base) == []
