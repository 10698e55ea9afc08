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
