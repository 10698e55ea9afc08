"""AsyncMPClient with a real engine process: requests, aborts, utilities, progress, one loop."""

import asyncio
import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import zmq

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.core_client import make_async_mp_client, make_client
from llmkernel.client.engine_core_client import EngineCoreClient
from llmkernel.config import EngineArgs
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import UtilityCallError, WrongLoopError
from llmkernel.protocol.handshake import STAGES, Progress
from llmkernel.protocol.outputs import (
    EEP_NOTIFICATION_CALL_ID,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
    UtilityResult,
)
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.serial import MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket
from tests.client.fake_engine import (
    FAKE_EXECUTOR,
    begin,
    collect,
    make_async_client,
    make_request,
    tokens,
    wait_gone,
)
from tests.engine.raw_engine import RawEngine


@pytest.mark.row("A-005", "A-009", "A-011", "A-020", "A-021", "A-074", "A-083", "A-085", "A-089", "A-154")
async def test_requests_stream_through_one_loop_and_no_thread(client: AsyncMPClient) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    for number in range(20):
        await client.add_request_async(make_request(f"r{number}", [number], max_tokens=30))
    ended = await collect(client, *(f"r{number}" for number in range(20)))
    for number in range(20):
        assert tokens(ended[f"r{number}"]) == fake_answer([number], 30)
    assert {thread.name for thread in threading.enumerate()} == threads
    assert not any("outputs" in name for name in threads)
    assert {task.get_name() for task in asyncio.all_tasks()} >= {"llmkernel-outputs"}


@pytest.mark.row("A-008", "A-120")
async def test_the_factories_pick_the_client() -> None:
    args = EngineArgs(model="fake:")
    made = make_async_mp_client(args, FAKE_EXECUTOR, log_stats=False, client_addresses=None, client_index=0)
    try:
        assert type(made) is AsyncMPClient
        assert isinstance(made, EngineCoreClient)
    finally:
        made.shutdown()
    with pytest.raises(NotImplementedError, match="multiprocess_mode"):
        make_client(False, True, args, FAKE_EXECUTOR)


@pytest.mark.row("A-075")
async def test_an_abort_ends_a_request_and_an_empty_one_sends_nothing(client: AsyncMPClient) -> None:
    await client.add_request_async(make_request("long", max_tokens=3900))
    await client.abort_requests_async([])
    await client.abort_requests_async(["long", "unknown"])
    ended = await collect(client, "long")
    assert ended["long"][-1].finish_reason is FinishReason.ABORT


async def test_an_abort_from_sync_code_on_the_loop(client: AsyncMPClient) -> None:
    await client.add_request_async(make_request("long", max_tokens=3900))
    client.abort_requests_soon(iter(["long"]))
    assert (await collect(client, "long"))["long"][-1].finish_reason is FinishReason.ABORT


def test_an_abort_while_the_loop_stands_still() -> None:
    """Terminal IPython runs its loop only while a cell runs."""
    loop = asyncio.new_event_loop()
    made = make_async_client("fake:step_ms=0.5,max_model_len=4000,num_blocks=600")
    try:
        loop.run_until_complete(begin(made, "long", max_tokens=3900))
        made.abort_requests_soon(["long"])
        ended = loop.run_until_complete(collect(made, "long"))
        assert ended["long"][-1].finish_reason is FinishReason.ABORT
    finally:
        made.shutdown()
        loop.close()


@pytest.mark.row("A-121", "A-122", "A-123", "A-124", "A-125", "A-126", "A-127", "A-128")
async def test_utility_calls(client: AsyncMPClient) -> None:
    """Many at once, each with its own answer; the engine's exception with its type and traceback."""
    answers = await asyncio.gather(*(client.collective_rpc_async("echo", None, (n, {"k": [n]})) for n in range(50)))
    assert answers == [[[n, {"k": [n]}]] for n in range(50)]
    assert await client.call_utility_async("get_supported_tasks") == ["generate"]
    with pytest.raises(UtilityCallError, match="no_such_thing failed in the engine: AttributeError") as caught:
        await client.call_utility_async("no_such_thing")
    assert caught.value.remote_type == "AttributeError"
    assert "call_utility" in caught.value.remote_traceback
    with pytest.raises(UtilityCallError, match="not built"):
        await client.call_utility_async("add_lora")
    assert len(client.utility_results) == 0


@pytest.mark.row("A-123", "A-124")
async def test_a_cancelled_or_late_call_leaves_nothing_behind(client: AsyncMPClient) -> None:
    await begin(client, "running", max_tokens=3900)
    with pytest.raises(TimeoutError):
        await client.call_utility_async("pause_scheduler", "wait", timeout=0.05)
    waiting = asyncio.create_task(client.call_utility_async("pause_scheduler", "wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(client.utility_results) == 0
    await client.abort_requests_async(["running"])
    await collect(client, "running")
    assert await client.call_utility_async("is_scheduler_paused") is True


@pytest.mark.row("A-076", "A-077", "A-078", "A-081", "A-157", "A-159")
async def test_aux_frames_are_kept_until_zmq_has_let_go_of_them(client: AsyncMPClient) -> None:
    """Identity, type, payload and one array of 1 MB: more than three frames, so the message is tracked."""
    request = make_request("embeds", max_tokens=2)
    request.prompt_embeds = np.zeros((256, 1024), np.float32)
    assert len(MsgpackEncoder().encode(request)) == 2
    await client.add_request_async(request)
    await asyncio.sleep(0)  # the send's done-callback
    assert len(client.pending_messages) == 1
    output = (await collect(client, "embeds"))["embeds"][-1]
    assert output.finish_reason is FinishReason.ERROR and "prompt_embeds" in str(output.stop_reason)
    deadline = time.monotonic() + 10
    while len(client.pending_messages) and time.monotonic() < deadline:
        await client.call_utility_async("is_sleeping")  # every send looks what is done
    assert len(client.pending_messages) == 0


@pytest.mark.row("A-139")
async def test_progress_comes_in_stages_and_ends_with_ready(client: AsyncMPClient) -> None:
    seen: list[Progress] = []
    loading = make_async_client("fake:load_ms=40")
    try:
        loading.add_progress_callback(lambda progress: 1 / 0)  # a broken display must not stop a load
        loading.add_progress_callback(seen.append)
        facts = await loading.ready()
        assert facts.model.name == "fake:load_ms=40"
    finally:
        loading.shutdown()
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["spawned", "importing", "weights", "kv cache", "warm-up", "ready"]
    assert [STAGES.index(stage) for stage in stages] == sorted(STAGES.index(stage) for stage in stages)
    late: list[Progress] = []
    client.add_progress_callback(late.append)
    assert [progress.stage for progress in late] == ["ready"]


async def test_the_constructor_does_not_block_and_the_first_request_waits_for_the_load() -> None:
    started = time.monotonic()
    loading = make_async_client("fake:load_ms=300")
    try:
        assert time.monotonic() - started < 0.3
        await loading.add_request_async(make_request("first", max_tokens=3))
        assert time.monotonic() - started > 0.3
        assert tokens((await collect(loading, "first"))["first"]) == fake_answer([1, 2, 3], 3)
    finally:
        loading.shutdown()


async def test_cancelling_the_wait_does_not_end_the_load() -> None:
    loading = make_async_client("fake:load_ms=300")
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loading.ready(), 0.05)
        assert (await loading.ready()).block_size == 16
    finally:
        loading.shutdown()


@pytest.mark.row("A-092", "A-093")
def test_a_client_built_outside_a_loop_starts_at_first_use_and_belongs_to_that_loop() -> None:
    outside = make_async_client()
    assert outside.process is not None

    async def use() -> list[int]:
        await outside.add_request_async(make_request("a", max_tokens=4))
        return tokens((await collect(outside, "a"))["a"])

    try:
        assert asyncio.run(use()) == fake_answer([1, 2, 3], 4)
        with pytest.raises(WrongLoopError, match="one event loop"):
            asyncio.run(use())
        assert outside.process.exitcode is None
    finally:
        outside.shutdown()


@pytest.mark.row("A-021")
async def test_a_call_from_another_loop_is_refused(client: AsyncMPClient) -> None:
    def elsewhere() -> None:
        asyncio.run(client.call_utility_async("is_sleeping"))

    with pytest.raises(WrongLoopError, match="one event loop"):
        await asyncio.to_thread(elsewhere)
    assert await client.call_utility_async("is_sleeping") is False


@pytest.mark.row("A-091")
async def test_the_output_task_is_made_once(client: AsyncMPClient) -> None:
    task = client.resources.tasks["outputs"]
    await client.call_utility_async("is_sleeping")
    client._ensure_output_queue_task()
    assert client.resources.tasks["outputs"] is task


@pytest.mark.row("A-094", "A-095")
async def test_a_client_that_nobody_holds_ends_its_tasks_and_its_engine() -> None:
    made = make_async_client()
    await made.ready()
    await made.call_utility_async("is_sleeping")
    pid, tasks = made.process.pid, list(made.resources.tasks.values())
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    await asyncio.wait(tasks, timeout=2)
    assert all(task.done() for task in tasks)
    wait_gone(pid, 2)


@pytest.mark.row("A-086", "A-101")
async def test_messages_without_outputs_or_statistics_are_not_queued(client: AsyncMPClient) -> None:
    await push(client, EngineCoreOutputs())
    await client.add_request_async(make_request("a", max_tokens=1))
    first = await client.get_output_async()
    assert first.outputs or first.scheduler_stats


async def test_garbage_on_the_sockets_of_a_client_is_ignored(
    client: AsyncMPClient, caplog: pytest.LogCaptureFixture
) -> None:
    await push(client, [b""], [b"\xc1"], [b"\x93\x01"], [b"ENGINE_CORE_DEAD", b"more"], [b"x" * 1000] * 5)
    stranger = make_zmq_socket(client.resources.ctx, address(client, "in0"), zmq.DEALER, bind=False, linger=0)
    with stranger:
        stranger.send_multipart([b"\x00" * 100, b"\xff"])
        await client.add_request_async(make_request("a", max_tokens=3))
        assert tokens((await collect(client, "a"))["a"]) == fake_answer([1, 2, 3], 3)
    assert "malformed output message" in caplog.text


async def test_garbage_on_the_handshake_does_not_stop_a_load(caplog: pytest.LogCaptureFixture) -> None:
    loading = make_async_client("fake:load_ms=200")
    try:
        stranger = make_zmq_socket(loading.resources.ctx, address(loading, "hs"), zmq.DEALER, bind=False, linger=0)
        with stranger:
            for frames in ([b"\xc1"], [b""], [b"\x81\xa6status\xa5READY"], [b"a", b"b", b"c"]):
                stranger.send_multipart(frames)
            await loading.ready()
    finally:
        loading.shutdown()
    assert "Ignored a" in caplog.text


class Hooked(AsyncMPClient):
    """A subclass with both hooks."""

    seen: ClassVar[list[Any]] = []
    notified: ClassVar["asyncio.Queue[Any]"]

    async def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.seen.extend(output.request_id for output in outputs.outputs)

    async def eep_process_engine_core_notification(self, data: Any) -> None:
        await self.notified.put((self.client_index, data))


@pytest.mark.row("A-096", "A-129", "A-130", "A-142", "A-143", "A-160", "A-141")
async def test_hooks_of_a_subclass_see_outputs_and_notifications(caplog: pytest.LogCaptureFixture) -> None:
    Hooked.notified = asyncio.Queue()
    hooked = Hooked(EngineArgs(model="fake:"), FAKE_EXECUTOR)
    try:
        await hooked.ready()
        await hooked.add_request_async(make_request("a", max_tokens=2))
        await collect(hooked, "a")
        assert "a" in Hooked.seen
        for data in (None, "ab", [1, 2, 3], ["RECONFIGURE_FINISHED", 3]):
            result = UtilityOutput(EEP_NOTIFICATION_CALL_ID, result=UtilityResult(data))
            await push(hooked, EngineCoreOutputs(utility_output=result))
        assert await asyncio.wait_for(Hooked.notified.get(), 5) == (0, ["RECONFIGURE_FINISHED", 3])
        assert Hooked.notified.empty()
        assert caplog.text.count("not a pair") == 2
    finally:
        hooked.shutdown()
    assert getattr(AsyncMPClient, "process_engine_outputs", None) is None


@pytest.mark.row("A-087", "A-088", "A-090")
async def test_whoever_waits_for_outputs_hears_when_the_task_ends(client: AsyncMPClient) -> None:
    waiting = asyncio.create_task(client.get_output_async())
    await asyncio.sleep(0)
    client.resources.tasks["outputs"].cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        await waiting


@pytest.mark.row("A-079", "A-080", "A-082", "A-158", "A-042", "A-040")
async def test_clients_with_given_addresses_share_an_engine_that_another_one_starts() -> None:
    with RawEngine(num_clients=1, others=2) as engine:
        clients = [client_of(engine, index) for index in (1, 2)]
        try:
            for index, client in enumerate(clients):
                assert client.process is None
                assert (await client.ready()).pid == engine.process.pid
                await client.add_request_async(make_request("same-name" if index else "a", [index], max_tokens=5))
            assert tokens((await collect(clients[1], "same-name"))["same-name"]) == fake_answer([1], 5)
            assert tokens((await collect(clients[0], "a"))["a"]) == fake_answer([0], 5)
        finally:
            for client in clients:
                client.shutdown()
        assert engine.call("is_sleeping").result.result is False


@pytest.mark.row("A-040")
async def test_an_old_peer_registers_with_an_empty_message() -> None:
    with RunDirectory() as run:
        addresses = {"input_address": run.address("in0"), "output_address": run.address("out0")}
        client = AsyncMPClient(EngineArgs(model="fake:"), client_addresses=addresses)
        try:
            dealer = make_zmq_socket(
                client.resources.ctx, run.address("in0"), zmq.DEALER, bind=False, identity=b"\0\0", linger=0
            )
            with dealer:
                dealer.send(b"")
                assert (await asyncio.wait_for(client.ready(), 10)).version == ""
        finally:
            client.shutdown()


def client_of(engine: RawEngine, index: int) -> AsyncMPClient:
    addresses = {
        "input_address": engine.run.address(f"in{index}"),
        "output_address": engine.run.address(f"out{index}"),
    }
    return AsyncMPClient(EngineArgs(model="fake:"), client_addresses=addresses, client_index=index, client_count=3)


async def push(client: AsyncMPClient, *messages: Any) -> None:
    """Put messages into the client's output socket, as its engine would, and wait until the client has read them."""
    socket = make_zmq_socket(zmq.Context.instance(), address(client, "out0"), zmq.PUSH, bind=False, linger=1000)
    with socket:
        for message in messages:
            frames = message if isinstance(message, list) else MsgpackEncoder().encode(message)
            socket.send_multipart(frames)
        future = asyncio.get_running_loop().create_future()
        call_id = client.utility_results.open("pushed", future)
        socket.send_multipart(MsgpackEncoder().encode(EngineCoreOutputs(utility_output=UtilityOutput(call_id))))
        await asyncio.wait_for(future, 10)


def address(client: AsyncMPClient, name: str) -> str:
    assert client.resources.run_directory is not None
    return client.resources.run_directory.address(name)
