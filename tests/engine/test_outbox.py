import math

import numpy as np
import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.outbox import Outbox
from llmkernel.protocol.outputs import FinishReason, LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SchedulerStats
from tests.engine.harness import Engine


def request(name: str = "a", client_index: int = 0, **params) -> Request:
    return Request(name, [1, 2], SamplingParams(**params), client_index=client_index)


def say(outbox: Outbox, item: Request, token_id: int, *, last: bool = False) -> None:
    item.append_output_token(token_id)
    if last:
        item.status = RequestStatus.FINISHED_STOPPED
    outbox.post(item)


def sizes(engine: Engine, name: str) -> list[int]:
    return [len(output.new_token_ids) for output in engine.outputs[name]]


@pytest.mark.parametrize(
    ("of_engine", "of_request", "expected"),
    [
        (1, None, [1] * 8),
        (3, None, [1, 3, 3, 1]),
        (1, 3, [1, 3, 3, 1]),
        (3, 1, [1, 3, 3, 1]),
        (2, 5, [1, 5, 2]),
        (100, None, [1, 7]),
        (7, None, [1, 7]),
    ],
)
def test_the_first_token_then_every_kth_then_the_end(
    of_engine: int, of_request: int | None, expected: list[int]
) -> None:
    engine = Engine(stream_interval=of_engine)
    engine.add("a", [1], max_tokens=8, stream_interval=of_request)
    engine.run()
    assert sizes(engine, "a") == expected
    assert engine.tokens("a") == fake_answer([1], 8)


def test_further_tokens_wait_until_the_last_message_is_a_pace_old() -> None:
    """Steps of 4 ms at a pace of 10: the first token, then three tokens at a time, stamped with the newest's step."""
    outbox, item, told = Outbox(), request(), []
    outbox.pace = 0.010
    for step in range(8):
        now = 5.0 + step * 0.004
        say(outbox, item, step)
        if not outbox.may_wait(now):
            (message,) = outbox.take(now=now).values()
            told.append((message.timestamp, message.outputs[0].new_token_ids))
    assert told == [(5.0, [0]), (5.012, [1, 2, 3]), (5.024, [4, 5, 6])]
    assert outbox and outbox.take()[0].outputs[0].new_token_ids == [7]
    assert not outbox


def test_steps_that_are_slower_than_the_pace_are_told_one_by_one() -> None:
    outbox, item = Outbox(), request()
    outbox.pace = 0.010
    for step in range(5):
        say(outbox, item, step)
        assert not outbox.may_wait(step * 0.0101)
        assert outbox.take(now=step * 0.0101)[0].outputs[0].new_token_ids == [step]


@pytest.mark.parametrize("news", ["first token", "end", "refusal", "own interval"])
def test_what_does_not_wait_takes_along_what_waits(news: str) -> None:
    outbox, patient = Outbox(), request("patient")
    outbox.pace = math.inf
    other = request("other", 1, stream_interval=1 if news == "own interval" else None)
    for item in (patient, other) if news in ("end", "own interval") else (patient,):
        say(outbox, item, 1)
    outbox.take(now=0.0)
    say(outbox, patient, 2)
    assert outbox.may_wait(1.0)
    if news == "refusal":
        outbox.refuse(1, "other", "no")
    else:
        say(outbox, other, 3, last=news == "end")
    assert not outbox.may_wait(1.0)
    messages = outbox.take(now=1.0)
    assert messages[0].outputs[0].new_token_ids == [2]
    assert messages[1].outputs[0].new_token_ids == ([] if news == "refusal" else [3])


def test_the_end_of_a_request_tells_its_waiting_tokens_once() -> None:
    outbox, item = Outbox(), request()
    outbox.pace = math.inf
    say(outbox, item, 1)
    outbox.take(now=0.0)
    say(outbox, item, 2)
    say(outbox, item, 3, last=True)
    (output,) = outbox.take(now=0.0)[0].outputs
    assert output.new_token_ids == [2, 3] and output.finish_reason is FinishReason.STOP


def test_an_engine_with_a_pace_tells_the_first_token_and_then_all_at_the_end() -> None:
    engine = Engine()
    engine.core.pace_outputs(math.inf)
    engine.add("a", [1], max_tokens=8, logprobs=2)
    engine.run()
    assert sizes(engine, "a") == [1, 7] and engine.tokens("a") == fake_answer([1], 8)
    assert engine.outputs["a"][1].new_logprobs.logprob_token_ids[:, 0].tolist() == fake_answer([1], 8)[1:]


def test_tokens_wait_for_nobody_when_nothing_is_left_to_run() -> None:
    """Frozen by a pause: the next turn of the busy loop, which does no step, tells them; then it may block."""
    engine = Engine()
    engine.core.pace_outputs(math.inf)
    engine.add("a", [1], max_tokens=20)
    for _ in range(4):
        engine.step()
    paused = engine.core.call_utility("pause_scheduler", ["keep", False])
    assert engine.core.has_requests()
    engine.step()
    assert sizes(engine, "a") == [1, 3]
    engine.step()
    assert paused.done() and not engine.core.has_requests()


def test_a_step_that_preempts_is_told_at_once() -> None:
    """Its statistics say how many; and whom it cost the blocks has no step in which more tokens might come."""
    engine = Engine(num_blocks=7)
    engine.core.pace_outputs(math.inf)
    for name in "ab":
        engine.add(name, [1, 2, 3, 4], max_tokens=12)
    engine.run()
    assert sum(stats.num_preempted for stats in engine.stats) > 0
    assert engine.tokens("a") == engine.tokens("b") == fake_answer([1, 2, 3, 4], 12)


def test_an_abort_tells_what_was_held_back() -> None:
    engine = Engine(stream_interval=10)
    engine.add("a", [1], max_tokens=20)
    for _ in range(5):
        engine.step()
    engine.core.abort_requests(["a"])
    engine.run()
    assert sizes(engine, "a") == [1, 4]
    assert engine.last("a").finish_reason is FinishReason.ABORT


def test_logprobs_travel_with_their_tokens() -> None:
    engine = Engine(stream_interval=3)
    engine.add("a", [1], max_tokens=5, logprobs=2)
    engine.run()
    for output in engine.outputs["a"]:
        count = len(output.new_token_ids)
        assert output.new_logprobs.logprob_token_ids.shape == output.new_logprobs.logprobs.shape == (count, 3)
        assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
        assert output.new_logprobs.sampled_token_ranks.tolist() == [1] * count


def test_logprobs_of_tokens_after_a_stop_are_cut_off() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=2, logprobs=0)
    step = engine.core.scheduler.schedule()
    output = engine.executor.execute_model(step)
    output.sampled_token_ids["a"] = [10, 11, 12]  # as a speculating worker would
    output.logprobs["a"] = LogprobsLists(
        np.array([[10], [11], [12]], np.int32), np.zeros((3, 1), np.float32), np.array([1, 2, 3], np.int32)
    )
    engine.core.scheduler.update_from_output(step, output)
    (said,) = engine.core.scheduler.outbox.take()[0].outputs
    assert said.new_token_ids == [10, 11]
    assert said.new_logprobs.sampled_token_ranks.tolist() == [1, 2]


@pytest.mark.row("A-061", "A-062")
def test_outputs_go_to_the_client_that_asked() -> None:
    engine = Engine()
    for index, client in enumerate([0, 3, 0, 1]):
        engine.add(str(index), [index + 1], max_tokens=2, client_index=client)
    messages = engine.core.step()
    assert {client: [output.request_id for output in message.outputs] for client, message in messages.items()} == {
        0: ["0", "2"],
        3: ["1"],
        1: ["3"],
    }
    assert all(message.timestamp > 0 for message in messages.values())


def test_one_client_gets_the_statistics_and_it_is_told_something_anyway() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=2, client_index=2)
    messages = engine.core.step()
    assert messages.keys() == {2} and messages[2].scheduler_stats.num_running_reqs == 1

    outbox = Outbox()
    say(outbox, request("x", 4), 1)
    say(outbox, request("y", 1), 1)
    messages = outbox.take(SchedulerStats())
    assert [message.scheduler_stats is not None for message in messages.values()].count(True) == 1


def test_client_0_gets_statistics_that_come_alone() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add("a", list(range(1, 11)), max_tokens=2, client_index=2)
    messages = engine.core.step()  # a partial prefill
    assert messages.keys() == {0}
    assert messages[0].outputs == [] and messages[0].scheduler_stats.num_batched_tokens == 4


def test_finished_requests_are_named_for_clients_that_balance() -> None:
    outbox = Outbox(include_finished=True)
    say(outbox, request("a"), 5, last=True)
    say(outbox, request("b"), 5)
    say(outbox, request("c", 1), 5)
    messages = outbox.take()
    assert messages[0].finished_requests == {"a"} and messages[1].finished_requests is None


def test_trace_headers_come_back() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=1, trace_headers={"traceparent": "00-1"})
    engine.run()
    assert engine.last("a").trace_headers == {"traceparent": "00-1"}


def test_it_is_empty_once_taken() -> None:
    outbox = Outbox()
    assert not outbox and outbox.take() == {}
    say(outbox, request(), 1)
    assert outbox
    outbox.take()
    assert not outbox
