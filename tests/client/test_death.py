"""A dead engine fails every waiter within a second, and says how it died."""

import asyncio
import os
import queue
import signal
import threading
import time

import pytest
import zmq

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.async_tasks import OutputHooks, run_output_task
from llmkernel.client.mp_client import MPClient
from llmkernel.config import EngineArgs
from llmkernel.engine.fake_executor import CRASH_EXIT_CODE, fake_answer
from llmkernel.errors import EngineDeadError
from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs
from llmkernel.protocol.serial import MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket
from tests.client.fake_engine import (
    begin,
    begin_sync,
    collect_sync,
    make_async_client,
    make_request,
    make_sync_client,
    tokens,
)

FAST = 1.0
"""Seconds in which everybody must know."""


async def read_until_death(client: AsyncMPClient) -> tuple[list[EngineCoreOutputs], EngineDeadError]:
    """Outputs up to the error, as AsyncLLM's handler sees them."""
    outputs = []
    try:
        while True:
            outputs.append(await client.get_output_async())
    except EngineDeadError as error:
        return outputs, error


@pytest.mark.row("A-009", "A-140")
async def test_sigkill_fails_streams_utilities_and_later_calls_within_a_second(client: AsyncMPClient) -> None:
    await begin(client, "stream", max_tokens=3900)
    reader = asyncio.create_task(read_until_death(client))
    pausing = asyncio.create_task(client.call_utility_async("pause_scheduler", "wait"))
    await asyncio.sleep(0)
    assert len(client.utility_results) == 1
    started = time.monotonic()
    os.kill(client.process.pid, signal.SIGKILL)
    outputs, error = await reader
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        await pausing
    assert time.monotonic() - started < FAST
    assert error.exitcode == -signal.SIGKILL
    assert "memory" in str(error) and str(error).splitlines()[0].endswith("Load the model again.")
    said = [token for message in outputs for output in message.outputs for token in output.new_token_ids]
    assert said == fake_answer([1, 2, 3], len(said) + 1)[1:]  # the first one was read before
    for call in (
        client.add_request_async(make_request("late")),
        client.call_utility_async("is_sleeping"),
        client.get_output_async(),
    ):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await call
    await client.abort_requests_async(["stream"])
    assert client.engine_dead and client.dead_error is not None and client.dead_error.exitcode == -9


def push_tokens(client: MPClient, request_id: str, count: int) -> None:
    """`count` messages of one token each, in the client's output socket when this returns; the loop does not turn."""
    assert client.resources.run_directory is not None
    with (
        zmq.Context() as ctx,
        make_zmq_socket(
            ctx, client.resources.run_directory.address("out0"), zmq.PUSH, bind=False, linger=10_000
        ) as push,
    ):
        for token in range(count):
            outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [token])])
            push.send_multipart(MsgpackEncoder().encode(outputs))


async def test_tokens_that_were_on_their_way_arrive_before_the_error(client: AsyncMPClient) -> None:
    """They come, and the engine dies, while the loop is blocked; then the loop reads on."""
    push_tokens(client, "a", 500)
    os.kill(client.process.pid, signal.SIGKILL)
    assert client.process.wait(5)  # blocks this loop
    outputs, error = await asyncio.wait_for(read_until_death(client), FAST)
    assert error.exitcode == -signal.SIGKILL
    assert [token for message in outputs for o in message.outputs for token in o.new_token_ids] == list(range(500))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await client.get_output_async()


class OneMessage:
    """An output socket whose only message is taken out of it when the test says so."""

    def __init__(self) -> None:
        self.receiving: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    def recv_multipart(self, *, copy: bool) -> "asyncio.Future[list[bytes]]":
        return self.receiving

    async def poll(self, _: int) -> int:
        return 0


async def test_a_message_that_the_reader_has_just_received_is_not_lost(
    client: AsyncMPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message and the engine's end come in the same turn of the loop."""
    os.kill(client.process.pid, signal.SIGKILL)
    _, error = await read_until_death(client)
    assert error.exitcode == -signal.SIGKILL
    socket = OneMessage()
    monkeypatch.setattr(client.resources, "output_socket", socket)
    reader = asyncio.create_task(run_output_task(client._state, OutputHooks.of(client)))
    await asyncio.sleep(0)
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7])])
    socket.receiving.set_result([bytes(frame) for frame in MsgpackEncoder().encode(outputs)])
    reader.cancel()
    await reader
    assert (await client.get_output_async()).outputs[0].new_token_ids == [7]


async def test_a_crash_is_told_with_its_exit_code(client: AsyncMPClient) -> None:
    await client.add_request_async(make_request("crash", [98]))
    _, error = await asyncio.wait_for(read_until_death(client), 5)
    assert error.exitcode == CRASH_EXIT_CODE
    assert f"exit code {CRASH_EXIT_CODE}" in str(error)


def test_a_sync_client_too_reads_what_was_said_before_the_error() -> None:
    client = make_sync_client()
    try:
        client.ready()
        push_tokens(client, "a", 500)
        os.kill(client.process.pid, signal.SIGKILL)
        assert client.process.wait(5)
        said: list[int] = []
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                while True:
                    said += [token for output in client.get_output().outputs for token in output.new_token_ids]
        assert said == list(range(500))
    finally:
        client.shutdown()


@pytest.mark.row("A-060", "A-084", "A-090")
async def test_engine_core_dead_carries_the_exit_and_waits_for_it(client: AsyncMPClient) -> None:
    """SIGTERM from outside: the engine says ENGINE_CORE_DEAD and leaves with 0; whoever waits hears it."""
    await client.add_request_async(make_request("stream", max_tokens=3900))
    reader = asyncio.create_task(read_until_death(client))
    await asyncio.sleep(0)
    started = time.monotonic()
    os.kill(client.process.pid, signal.SIGTERM)
    _, error = await reader
    assert time.monotonic() - started < FAST
    assert error.exitcode == 0


async def test_a_fault_in_the_busy_loop_arrives_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that is gone ends the engine: its exception travels in front of ENGINE_CORE_DEAD."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    client = AsyncMPClient(EngineArgs(model="fake:raise_token=98"), "tests.client.broken_executor:DyingExecutor")
    try:
        await client.ready()
        await client.add_request_async(make_request("boom", [98]))
        started = time.monotonic()
        _, error = await read_until_death(client)
        assert time.monotonic() - started < FAST
        assert "WorkerGone: the worker is gone" in str(error)
        assert "check_health" in error.remote_traceback
        assert error.exitcode == 1
        assert "The engine died." in error.log_tail
    finally:
        client.shutdown()


@pytest.mark.row("A-093")
def test_a_death_before_the_first_use_is_not_missed() -> None:
    client = make_async_client()
    try:
        os.kill(client.process.pid, signal.SIGKILL)
        assert client.process.wait(5)

        async def use() -> None:
            await asyncio.wait_for(client.add_request_async(make_request("a")), FAST)

        with pytest.raises(RuntimeError, match="killed by SIGKILL"):
            asyncio.run(use())
    finally:
        client.shutdown()


async def test_a_death_while_nobody_waits_is_known_at_the_next_call(client: AsyncMPClient) -> None:
    os.kill(client.process.pid, signal.SIGKILL)
    assert client.process.wait(5)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await client.add_request_async(make_request("late"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.ensure_alive()


@pytest.mark.row("A-010")
def test_sigkill_fails_the_blocked_calls_of_a_sync_client() -> None:
    client = make_sync_client("fake:step_ms=1,max_model_len=4000,num_blocks=600")
    errors: queue.Queue[BaseException] = queue.Queue()

    def call_blocked() -> None:
        try:
            client.call_utility("pause_scheduler", "wait")
        except EngineDeadError as error:
            errors.put(error)

    try:
        client.ready()
        begin_sync(client, "stream", max_tokens=3900)
        caller = threading.Thread(target=call_blocked)
        caller.start()
        while not len(client.utility_results):
            client.get_output()
        started = time.monotonic()
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            while True:
                client.get_output()
        assert "SIGKILL" in str(errors.get(timeout=FAST))
        assert time.monotonic() - started < FAST
        caller.join()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.add_request(make_request("late"))
    finally:
        client.shutdown()


def test_an_interrupt_of_the_process_group_leaves_the_engine_alone() -> None:
    """SIGINT to the engine's own group, as a Ctrl-C or a kernel's interrupt would be if it got there."""
    client = make_sync_client()
    try:
        client.ready()
        pid = client.process.pid
        assert os.getpgid(pid) == pid != os.getpgid(0)
        os.killpg(pid, signal.SIGINT)
        client.add_request(make_request("a", max_tokens=5))
        assert tokens(collect_sync(client, "a")["a"]) == fake_answer([1, 2, 3], 5)
    finally:
        client.shutdown()
