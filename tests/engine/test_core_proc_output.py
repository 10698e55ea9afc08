"""The output thread: reused buffers, large arrays, slow and vanished readers, the last word."""

import hashlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.output_sender import OutputSender
from llmkernel.protocol.outputs import (
    ENGINE_CORE_DEAD,
    ENGINE_FAULT_CALL_ID,
    EngineCoreOutput,
    EngineCoreOutputs,
    LogprobsLists,
    UtilityFailure,
    UtilityOutput,
    UtilityResult,
)
from llmkernel.protocol.requests import EngineCoreRequestType
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.serial import MsgpackDecoder
from llmkernel.protocol.stats import PrefixCacheStats, SchedulerStats
from llmkernel.protocol.transport import make_zmq_socket
from tests.engine.raw_engine import PATIENCE_MS, RawEngine


class Outputs:
    """An OutputSender and the PULL sockets of its clients."""

    def __init__(self, num_clients: int = 1, hwm: int = 1024) -> None:
        self.run = RunDirectory()
        self.ctx = zmq.Context()
        paths = [self.run.address(f"out{i}") for i in range(num_clients)]
        self.pulls = [make_zmq_socket(self.ctx, path, zmq.PULL, linger=0, hwm=hwm) for path in paths]
        self.sender = OutputSender(paths)
        self.sender.start()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)

    def receive(self, client: int = 0) -> EngineCoreOutputs | None:
        """The next message, None for ENGINE_CORE_DEAD."""
        assert self.pulls[client].poll(PATIENCE_MS)
        frames = self.pulls[client].recv_multipart(copy=False)
        return None if bytes(frames[0]) == ENGINE_CORE_DEAD else self.decoder.decode(frames)

    def receive_all(self, client: int = 0) -> list[EngineCoreOutputs]:
        messages = []
        while (message := self.receive(client)) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.ctx.destroy(linger=0)
        self.run.close()


@pytest.fixture
def outputs() -> Iterator[Outputs]:
    made = Outputs(hwm=4)
    yield made
    made.sender.send_dead(None, timeout=0)
    made.receive_all()
    made.close()


def one(request_id: str, tokens: list[int], **fields: object) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, tokens, **fields)])  # type: ignore[arg-type]


def big(seed: int) -> LogprobsLists:
    """About 1 MB of logprobs that no other seed has."""
    values = np.random.default_rng(seed)
    return LogprobsLists(
        values.integers(0, 2**31, (8, 16_384), np.int32),
        values.random((8, 16_384), np.float32),
        values.integers(0, 2**31, 8, np.int32),
    )


def digest(lists: LogprobsLists) -> str:
    arrays = (lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


@pytest.mark.row("A-038", "A-056", "A-057", "A-058", "A-059")
def test_reused_buffers_never_corrupt_what_a_slow_reader_has_not_read(outputs: Outputs) -> None:
    """Arrays go without a copy, 500 KB of msgpack in a reused buffer; the reader starts when all is sent."""
    expected = []
    for seed in range(40):
        tokens = list(np.random.default_rng(1000 + seed).integers(0, 2**31, 100_000).tolist())
        logprobs = big(seed)
        expected.append((f"r{seed}", digest(logprobs), tokens))
        outputs.sender.put(0, one(f"r{seed}", tokens, new_logprobs=logprobs))
        del logprobs
    outputs.sender.put(0, EngineCoreOutputs(utility_output=UtilityOutput(1, result=UtilityResult("last"))))
    received = []
    while True:
        message = outputs.receive()
        assert message is not None
        if message.utility_output is not None:
            break
        received += [(o.request_id, digest(o.new_logprobs), o.new_token_ids) for o in message.outputs if o.new_logprobs]
    assert received == expected


@pytest.mark.row("A-031", "A-057")
def test_a_slow_reader_gets_everything_merged_per_request_and_in_order(outputs: Outputs) -> None:
    """10,000 steps of 3 requests with nobody reading: `put` never waits, and a few messages hold it all."""
    cache = PrefixCacheStats(requests=1, queries=2, hits=1)
    started = time.monotonic()
    for step in range(10_000):
        stats = SchedulerStats(num_running_reqs=3, step_counter=step, num_preempted=1, prefix_cache_stats=cache)
        rows = LogprobsLists(np.full((1, 2), step, np.int32), np.zeros((1, 2), np.float32), np.ones(1, np.int32))
        message = EngineCoreOutputs(
            outputs=[EngineCoreOutput(name, [step], new_logprobs=rows if name == "b" else None) for name in "abc"],
            scheduler_stats=stats,
        )
        outputs.sender.put(0, message)
    assert time.monotonic() - started < 10
    while not outputs.sender.output_queue.empty() and time.monotonic() - started < 30:
        time.sleep(0.01)  # until the thread has taken everything; the queue itself is not bounded
    outputs.sender.put(0, EngineCoreOutputs(utility_output=UtilityOutput(1, result=UtilityResult("last"))))
    messages = []
    while (message := outputs.receive()) is not None and message.utility_output is None:
        messages.append(message)
    assert len(messages) < 2500  # what the sockets of both ends hold, and one message with the rest
    for name in "abc":
        said = [o for message in messages for o in message.outputs if o.request_id == name]
        assert [token for output in said for token in output.new_token_ids] == list(range(10_000))
        if name == "b":
            ids = np.concatenate([output.new_logprobs.logprob_token_ids for output in said if output.new_logprobs])
            assert ids[:, 0].tolist() == list(range(10_000))
    all_stats = [message.scheduler_stats for message in messages if message.scheduler_stats]
    assert all_stats[-1].step_counter == 9_999
    assert sum(stats.num_preempted for stats in all_stats) == 10_000
    assert sum(stats.prefix_cache_stats.queries for stats in all_stats if stats.prefix_cache_stats) == 20_000


def test_a_slow_client_does_not_hold_up_another() -> None:
    outputs = Outputs(num_clients=2, hwm=4)
    for step in range(5000):
        outputs.sender.put(0, one("slow", [step]))
        outputs.sender.put(1, one("quick", [step]))
    for client in (1, 0):
        received: list[int] = []
        while len(received) < 5000:
            message = outputs.receive(client)
            assert message is not None
            received += message.outputs[0].new_token_ids
        assert received == list(range(5000))
    outputs.sender.send_dead(None, timeout=0)
    assert outputs.receive_all(0) == outputs.receive_all(1) == []
    outputs.close()


@pytest.mark.row("A-037", "A-060")
def test_the_last_word_reaches_every_client_after_everything_else_and_says_why() -> None:
    outputs = Outputs(num_clients=3)
    for step in range(200):
        for client in range(3):
            outputs.sender.put(client, one("r", [step]))
    outputs.sender.send_dead(UtilityFailure("RuntimeError", "boom", "Traceback ..."), timeout=0)
    for client in (2, 1, 0):
        messages = outputs.receive_all(client)
        tokens = [token for message in messages for o in message.outputs for token in o.new_token_ids]
        assert tokens == list(range(200))
        notice = messages[-1].utility_output
        assert notice is not None and notice.call_id == ENGINE_FAULT_CALL_ID
        assert notice.failure is not None and notice.failure.message == "boom"
    outputs.close()


def test_a_result_that_does_not_travel_fails_its_call_only(outputs: Outputs) -> None:
    outputs.sender.put(0, EngineCoreOutputs(utility_output=UtilityOutput(5, result=UtilityResult(object()))))
    outputs.sender.put(0, one("r", [1]))
    answer = outputs.receive()
    assert answer is not None and answer.utility_output is not None and answer.utility_output.failure is not None
    assert "does not travel" in answer.utility_output.failure.message
    after = outputs.receive()
    assert after is not None and after.outputs[0].new_token_ids == [1]


def test_outputs_for_a_client_that_does_not_exist_are_dropped(outputs: Outputs) -> None:
    outputs.sender.put(7, one("r", [1]))
    outputs.sender.put(0, one("s", [2]))
    message = outputs.receive()
    assert message is not None and message.outputs[0].request_id == "s"


@pytest.mark.row("A-031", "A-063")
def test_the_engine_runs_on_while_its_client_does_not_read() -> None:
    """64 requests x 500 tokens; client 0 reads nothing until the engine is through, which client 1 can see."""
    with RawEngine("fake:num_blocks=4000", num_clients=2, output_hwm=8) as engine:
        ids = [f"r{i}" for i in range(64)]
        for number, request_id in enumerate(ids):
            engine.add(request_id, [number], max_tokens=500, logprobs=2)
        engine.wait_until(lambda stats: stats["num_running_reqs"] > 0, client=1)
        engine.wait_until(lambda stats: stats["num_running_reqs"] + stats["num_waiting_reqs"] == 0, client=1)
        ended = engine.collect(*ids)
        for number, request_id in enumerate(ids):
            outputs = ended[request_id]
            assert [t for o in outputs for t in o.new_token_ids] == fake_answer([number], 500)
            rows = np.concatenate([o.new_logprobs.logprob_token_ids for o in outputs if o.new_logprobs])
            assert rows[:, 0].tolist() == fake_answer([number], 500)
        assert max(len(outputs) for outputs in ended.values()) < 250


@pytest.mark.row("A-060")
def test_an_engine_that_fails_says_so_to_all_its_clients() -> None:
    """EXECUTOR_FAILED cannot come by wire; a client that vanishes and a signal can: SIGTERM is a graceful end."""
    with RawEngine(num_clients=2) as engine:
        engine.add("long", max_tokens=2000)
        engine.receive()
        os.kill(engine.process.pid, signal.SIGTERM)
        for client in (0, 1):
            while engine.receive_frames(client) != [ENGINE_CORE_DEAD]:
                pass
        assert engine.process.wait(5)
        assert engine.process.exitcode == 0


def test_a_client_that_vanishes_does_not_stop_the_engine() -> None:
    with RawEngine(num_clients=2) as engine:
        engine.add("orphan", max_tokens=2000)
        engine.receive()
        engine.inputs[0].close(linger=0)
        engine.outputs[0].close(linger=0)
        engine.add("alive", [5], client=1, max_tokens=5)
        assert engine.tokens("alive", client=1) == fake_answer([5], 5)
        engine.send(EngineCoreRequestType.ABORT, ["orphan"], client=1)
        engine.wait_until(lambda stats: stats["num_running_reqs"] == 0, client=1)
