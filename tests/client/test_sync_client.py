"""SyncMPClient: the same wire, blocking, beside any loop and in any thread."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from llmkernel.client.core_client import make_client
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import UtilityCallError
from llmkernel.protocol.outputs import FinishReason
from tests.client.fake_engine import FAKE_EXECUTOR, begin_sync, collect_sync, make_request, make_sync_client, tokens


@pytest.fixture(scope="module")
def client() -> Iterator[SyncMPClient]:
    made = make_client(
        True, False, EngineArgs(model="fake:step_ms=0.5,max_model_len=4000,num_blocks=600"), FAKE_EXECUTOR
    )
    assert isinstance(made, SyncMPClient)
    with made:
        made.ready()
        yield made


@pytest.mark.row("A-008", "A-010")
def test_requests_come_back_through_a_daemon_thread_and_a_queue(client: SyncMPClient) -> None:
    for number in range(5):
        client.add_request(make_request(f"r{number}", [number], max_tokens=6))
    ended = collect_sync(client, *(f"r{number}" for number in range(5)))
    for number in range(5):
        assert tokens(ended[f"r{number}"]) == fake_answer([number], 6)
    assert isinstance(client.outputs_queue, queue.Queue)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "llmkernel-outputs"] == [True]


@pytest.mark.row("A-010", "A-121", "A-124", "A-127")
def test_utility_calls_block_for_their_answer(client: SyncMPClient) -> None:
    assert client.call_utility("get_supported_tasks") == ["generate"]
    assert client.collective_rpc("echo", args=[1, "two"]) == [[1, "two"]]
    with pytest.raises(UtilityCallError, match="nonsense failed in the engine: AttributeError"):
        client.call_utility("nonsense")
    begin_sync(client, "long", max_tokens=3900)
    with pytest.raises(TimeoutError):
        client.call_utility("pause_scheduler", "wait", timeout=0.05)
    client.abort_requests([])
    client.abort_requests(["long"])
    assert collect_sync(client, "long")["long"][-1].finish_reason is FinishReason.ABORT
    client.call_utility("resume_scheduler")
    assert len(client.utility_results) == 0


def test_get_output_can_wait_for_a_limited_time(client: SyncMPClient) -> None:
    with pytest.raises(queue.Empty):
        while True:
            client.get_output(timeout=0.05)


def test_calls_from_several_threads_and_inside_a_running_loop(client: SyncMPClient) -> None:
    async def in_a_loop() -> object:
        return client.call_utility("is_sleeping")

    assert asyncio.run(in_a_loop()) is False
    answers: list[object] = []

    def call(number: int) -> None:
        answers.append(client.collective_rpc("echo", args=[number]))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [[[number]] for number in range(16)]  # type: ignore[type-var]


def test_large_arrays_are_kept_until_zmq_has_let_go_of_them(client: SyncMPClient) -> None:
    request = make_request("embeds", max_tokens=2)
    request.prompt_embeds = np.zeros((256, 1024), np.float32)
    client.add_request(request)
    assert len(client.pending_messages) == 1
    assert collect_sync(client, "embeds")["embeds"][-1].finish_reason is FinishReason.ERROR
    deadline = time.monotonic() + 10
    while len(client.pending_messages) and time.monotonic() < deadline:
        client.call_utility("is_sleeping")  # every send looks what is done
    assert len(client.pending_messages) == 0


def test_a_reader_that_pauses_gets_merged_outputs_and_loses_nothing() -> None:
    """20 requests x 1,000 tokens while nobody calls get_output; a utility call gets through all the same."""
    client = make_sync_client("fake:max_model_len=4000,num_blocks=2000")
    try:
        client.ready()
        ids = [f"r{number}" for number in range(20)]
        for number, request_id in enumerate(ids):
            client.add_request(make_request(request_id, [number], max_tokens=1000))
        deadline = time.monotonic() + 30
        while client.call_utility("get_stats")["step_counter"] < 1000 and time.monotonic() < deadline:
            pass
        assert client.outputs_queue.qsize() <= 65
        ended = collect_sync(client, *ids)
        for number, request_id in enumerate(ids):
            assert tokens(ended[request_id]) == fake_answer([number], 1000)
        assert max(len(outputs) for outputs in ended.values()) < 500  # of 1,000: how many depends on who runs when
    finally:
        client.shutdown()
