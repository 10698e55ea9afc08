"""EngineCoreProc on the wire: requests in, outputs out, several clients, and whatever else arrives."""

import itertools
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from llmkernel.engine.core_proc import MESSAGE_PACE
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.requests import EngineCoreRequestType
from llmkernel.protocol.serial import MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket
from tests.engine.raw_engine import RawEngine, make_request


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with RawEngine(
        "fake:step_ms=0.5,fail_token=99,raise_token=98,max_model_len=4000,num_blocks=600", num_clients=3
    ) as engine:
        yield engine


@pytest.mark.row("A-006", "A-018", "A-019", "A-020", "A-043", "A-046", "A-047", "A-048", "A-050", "A-054", "A-063")
def test_a_request_goes_in_and_its_tokens_come_out_one_by_one(engine: RawEngine) -> None:
    engine.add("a", [5, 6, 7], max_tokens=8, stream_interval=1)
    outputs = engine.collect("a")["a"]
    assert [output.new_token_ids for output in outputs] == [[token] for token in fake_answer([5, 6, 7], 8)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_tokens_that_come_fast_travel_together_and_nothing_overtakes_them(engine: RawEngine) -> None:
    """Steps of half a millisecond: fewer messages than tokens. A call's answer comes behind the tokens before it."""
    before = engine.call("get_stats").result.result["step_counter"]
    engine.add("fast", [5], max_tokens=2000)
    engine.receive()
    engine.send(EngineCoreRequestType.UTILITY, (0, 9, "get_stats", []))
    tokens = 1
    while (message := engine.receive()).utility_output is None:
        tokens += sum(len(output.new_token_ids) for output in message.outputs)
    assert tokens == message.utility_output.result.result["step_counter"] - before
    stamps = []
    while not (message := engine.receive()).outputs[0].finished:
        tokens += len(message.outputs[0].new_token_ids)
        stamps.append(message.timestamp)
    assert tokens + len(message.outputs[0].new_token_ids) == 2000
    assert all(later - earlier >= MESSAGE_PACE for earlier, later in itertools.pairwise(stamps))


@pytest.mark.row("A-033", "A-040", "A-042")
def test_the_first_word_to_every_client_is_the_registration(engine: RawEngine) -> None:
    assert [facts.max_model_len for facts in engine.registrations] == [4000, 4000, 4000]
    assert {facts.pid for facts in engine.registrations} == {engine.process.pid}


@pytest.mark.row("A-042", "A-055", "A-079")
def test_outputs_go_to_the_client_whose_index_the_request_carries(engine: RawEngine) -> None:
    for client in (0, 1, 2):
        engine.add(f"r{client}", [10 + client], client=client, max_tokens=4)
    for client in (2, 1, 0):
        assert engine.tokens(f"r{client}", client=client) == fake_answer([10 + client], 4)
    assert engine.call("is_sleeping", client=1, call_id=1).result.result is False


@pytest.mark.row("A-126", "A-128")
def test_a_utility_call_is_answered_with_its_result_or_its_failure(engine: RawEngine) -> None:
    assert engine.call("get_supported_tasks", call_id=2**63).result.result == ["generate"]
    failure = engine.call("os.system", "true").failure
    assert failure.type == "AttributeError"
    assert "get_supported_tasks" in failure.message
    assert "Traceback" in failure.traceback
    assert engine.call("get_supported_tasks", "too", "many").failure.type == "TypeError"


def test_a_deferred_answer_follows_the_last_outputs(engine: RawEngine) -> None:
    engine.add("long", max_tokens=300)
    first = engine.receive()
    engine.send(EngineCoreRequestType.UTILITY, (0, 11, "pause_scheduler", ["wait"]))
    tokens = [token for output in first.outputs for token in output.new_token_ids]
    while True:
        message = engine.receive()
        if message.utility_output is not None:
            break
        tokens += [token for output in message.outputs for token in output.new_token_ids]
    assert message.utility_output.call_id == 11
    assert tokens == fake_answer([1, 2, 3], 300)
    engine.call("resume_scheduler")


@pytest.mark.row("A-050")
def test_an_abort_ends_a_running_request(engine: RawEngine) -> None:
    engine.add("long", max_tokens=3900)
    engine.receive()
    engine.abort("long")
    outputs = engine.collect("long")["long"]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert sum(len(output.new_token_ids) for output in outputs) < 3900


@pytest.mark.row("A-047")
def test_an_abort_never_overtakes_its_add(engine: RawEngine) -> None:
    ids = [f"pair{i}" for i in range(200)]
    for request_id in ids:
        engine.add(request_id, max_tokens=3900)
        engine.abort(request_id)
    ended = engine.collect(*ids)
    assert all(outputs[-1].finish_reason is FinishReason.ABORT for outputs in ended.values())
    stats = engine.wait_until(lambda stats: stats["num_running_reqs"] == 0)
    assert (stats["num_waiting_reqs"], stats["kv_cache_usage"]) == (0, 0.0)


def test_an_abort_that_came_too_late_spares_the_next_request_of_that_name(engine: RawEngine) -> None:
    engine.add("again", max_tokens=2)
    engine.tokens("again")
    engine.abort("again", "never-was")
    engine.add("again", max_tokens=5)
    assert engine.tokens("again") == fake_answer([1, 2, 3], 5)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ([1, 9999], "9999"), ([1] * 4100, "4100"), ([1, 99], "fail_token"), ([1, 98], "raise_token")],
)
def test_a_bad_request_fails_alone_and_with_its_reason(engine: RawEngine, prompt: list[int], reason: str) -> None:
    engine.add("neighbour", [7], max_tokens=20)
    engine.add("bad", prompt, max_tokens=5)
    ended = engine.collect("neighbour", "bad")
    assert ended["bad"][-1].finish_reason is FinishReason.ERROR
    assert reason in str(ended["bad"][-1].stop_reason)
    if "raise_token" not in reason:  # a step that raises takes its requests with it, the engine goes on
        assert [t for output in ended["neighbour"] for t in output.new_token_ids] == fake_answer([7], 20)
    engine.add("after", [8], max_tokens=3)
    assert engine.tokens("after") == fake_answer([8], 3)


def test_a_second_request_of_a_live_name_does_not_touch_the_first(engine: RawEngine) -> None:
    engine.add("twin", [4], max_tokens=50)
    engine.add("twin", [5], max_tokens=50)
    assert engine.tokens("twin") == fake_answer([4], 50)


@pytest.mark.row("A-044", "A-045")
def test_a_malformed_request_that_says_whose_it_is_gets_an_answer(engine: RawEngine) -> None:
    fields = msgspec.to_builtins(make_request("wrong", client_index=1))
    fields[1] = "not token ids"
    engine.send(EngineCoreRequestType.ADD, fields, client=1)
    output = engine.collect("wrong", client=1)["wrong"][-1]
    assert output.finish_reason is FinishReason.ERROR
    assert "Malformed" in str(output.stop_reason)


GARBAGE = [
    [],
    [b""],
    [b"\x00"],
    [b"\x63", b"\x90"],
    [b"\x00\x00", b"\x90"],
    [b"\x00", b"\xc1"],
    [b"\x00", b"\x93\x01\x02"],
    [b"\x01", b"\x81\xa1a\x01"],
    [b"\x01", b"\x91\x05"],
    [b"\x02", b"\x90"],
    [b"\x02", b"\x92\x05\xc0"],
    [b"\x03", b"\x94\x00\x01\xa1m\x05"],
    [b"\x03", b"\x94\x63\x01\xa1m\x90"],
    [b"\x04", b"\x90"],
    [b"\x05", b"\x90"],
    [b"\x03", b"\xff" * 100_000, b"aux", b""],
    [b"x" * 1000] * 20,
]


def test_garbage_is_logged_and_ignored(engine: RawEngine) -> None:
    for frames in GARBAGE:
        engine.send_frames(*frames, client=1)
    foreign = msgspec.to_builtins(make_request("foreign"))
    foreign[11] = 77  # a client that does not exist
    engine.send(EngineCoreRequestType.ADD, foreign, client=1)
    engine.add("fine", [9], client=1, max_tokens=4)
    assert engine.tokens("fine", client=1) == fake_answer([9], 4)
    assert "malformed message" in engine.process.log_tail(200)


def test_a_stranger_on_the_sockets_of_a_client_harms_nobody(engine: RawEngine) -> None:
    """Somebody pushes into a client's own ROUTER and handshake; the engine has nothing to do with it and goes on."""
    stranger = make_zmq_socket(engine.ctx, engine.run.address("in0"), zmq.DEALER, bind=False, linger=0)
    with stranger:
        stranger.send_multipart([b"\xff", b"\x00" * 1000])
        engine.add("still", [3], max_tokens=3)
        assert engine.tokens("still") == fake_answer([3], 3)
        assert engine.inputs[0].recv_multipart()[1:] == [b"\xff", b"\x00" * 1000]


@pytest.mark.row("A-049", "A-053", "A-145")
def test_an_idle_engine_blocks_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMKERNEL_LOG_LEVEL", "DEBUG")
    with RawEngine() as engine:
        engine.add("a", max_tokens=2)
        engine.tokens("a")
        engine.call("is_sleeping")
        assert "EngineCore waiting for work." in engine.process.log_tail()
        steps = engine.call("collective_rpc", "num_steps").result.result
        assert engine.call("collective_rpc", "num_steps").result.result == steps


@pytest.mark.row("A-030", "A-156")
def test_one_thread_serves_the_inputs_of_all_clients(engine: RawEngine) -> None:
    started = time.monotonic()
    for round_ in range(20):
        for client in (2, 0, 1):
            assert engine.call("is_sleeping", client=client, call_id=round_).result.result is False
    assert time.monotonic() - started < 10


def test_large_arrays_in_a_request_are_refused_and_not_lost_in_the_frames(engine: RawEngine) -> None:
    """prompt_embeds is not built; its aux frame must still be taken off the wire in step."""
    np = pytest.importorskip("numpy")
    request = make_request("embeds", max_tokens=2)
    request.prompt_embeds = np.zeros((64, 64), np.float32)
    assert len(MsgpackEncoder().encode(request)) == 2
    engine.send(EngineCoreRequestType.ADD, request)
    output = engine.collect("embeds")["embeds"][-1]
    assert output.finish_reason is FinishReason.ERROR
    assert "prompt_embeds" in str(output.stop_reason)
