"""Outputs that wait: merged per request, in order, nothing lost."""

import asyncio
import queue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkernel.client.async_tasks import MergingQueue
from llmkernel.protocol.output_backlog import OutputBacklog
from llmkernel.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    UtilityOutput,
)
from llmkernel.protocol.stats import PrefillStats, PrefixCacheStats, SchedulerStats


def rows(*values: int) -> LogprobsLists:
    ids = np.array(values, np.int32).reshape(-1, 1)
    return LogprobsLists(ids, ids.astype(np.float32), np.ones(len(values), np.int32))


def drain(backlog: OutputBacklog) -> list[object]:
    return [backlog.popleft() for _ in range(len(backlog))]


ITEMS = st.lists(
    st.one_of(
        st.tuples(st.just("utility"), st.integers(0, 9)),
        st.tuples(st.just("stats"), st.integers(0, 9)),
        st.tuples(st.just("tokens"), st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(), max_size=3))),
        st.just(("take", None)),
    ),
    max_size=60,
)


@given(limit=st.integers(0, 5), items=ITEMS)
def test_whatever_is_put_in_comes_out_in_order_for_every_request_and_call(limit: int, items: list) -> None:
    """The history that a reader sees of each request, and between utility answers, is the one that was written."""
    backlog = OutputBacklog(limit)
    written: list[tuple[str, object]] = []
    read: list[tuple[str, object]] = []

    def take() -> None:
        item = backlog.popleft()
        if item.utility_output is not None:
            read.append(("utility", item.utility_output.call_id))
        for output in item.outputs:
            assert output.new_logprobs is None or output.new_logprobs.logprob_token_ids[:, 0].tolist() == [
                token % 1000 for token in output.new_token_ids
            ]
            read.extend((output.request_id, token) for token in output.new_token_ids)

    for kind, value in items:
        if kind == "utility":
            written.append(("utility", value))
            backlog.append(EngineCoreOutputs(utility_output=UtilityOutput(value)))
        elif kind == "stats":
            backlog.append(EngineCoreOutputs(scheduler_stats=SchedulerStats(step_counter=value)))
        elif kind == "tokens":
            written.extend((name, token) for name, tokens in value.items() for token in tokens)
            outputs = [
                EngineCoreOutput(name, list(tokens), rows(*(t % 1000 for t in tokens)) if tokens else None)
                for name, tokens in value.items()
            ]
            backlog.append(EngineCoreOutputs(outputs=outputs))
        elif len(backlog):
            take()
    while len(backlog):
        take()
    for name in "abcd":
        relevant = ("utility", name)
        assert [x for x in read if x[0] in relevant] == [x for x in written if x[0] in relevant]


def test_it_grows_to_its_limit_and_then_merges_into_the_newest() -> None:
    backlog = OutputBacklog(3)
    for step in range(100):
        backlog.append(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [step])]))
    assert len(backlog) == 3
    assert [len(item.outputs[0].new_token_ids) for item in drain(backlog)] == [1, 1, 98]


def test_exceptions_and_utility_answers_are_never_merged() -> None:
    backlog = OutputBacklog(1)
    for item in (EngineCoreOutputs(), ValueError("x"), EngineCoreOutputs(), EngineCoreOutputs(wave_complete=1)):
        backlog.append(item)
    backlog.append(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])]))
    assert len(backlog) == 5


def test_everything_about_a_request_is_joined() -> None:
    backlog = OutputBacklog()
    queued, scheduled = (EngineCoreEvent(kind, 1.0) for kind in list(EngineCoreEventType)[:2])
    prefill = PrefillStats(num_prompt_tokens=3)
    backlog.append(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], events=[queued], prefill_stats=prefill)]))
    backlog.append(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [2], events=[scheduled])], timestamp=7.0))
    backlog.append(
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("a", [], finish_reason=FinishReason.STOP, stop_reason=2)],
            finished_requests={"a"},
            timestamp=8.0,
        )
    )
    merged = backlog.popleft()
    output = merged.outputs[0]
    assert (output.new_token_ids, output.events, output.prefill_stats) == ([1, 2], [queued, scheduled], prefill)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 2)
    assert (merged.timestamp, merged.finished_requests) == (8.0, {"a"})


def test_statistics_keep_the_newest_state_and_sum_what_is_counted_per_message() -> None:
    backlog = OutputBacklog()
    for step in range(3):
        cache = PrefixCacheStats(requests=1, queries=10, hits=step)
        stats = SchedulerStats(num_running_reqs=step, num_preempted=1, prefix_cache_stats=cache)
        backlog.append(EngineCoreOutputs(scheduler_stats=stats))
    stats = backlog.popleft().scheduler_stats
    assert (stats.num_running_reqs, stats.num_preempted) == (2, 3)
    assert stats.prefix_cache_stats == PrefixCacheStats(requests=3, queries=30, hits=3)
    backlog.append(EngineCoreOutputs(scheduler_stats=SchedulerStats(prefix_cache_stats=cache)))
    backlog.append(EngineCoreOutputs(scheduler_stats=SchedulerStats(prefix_cache_stats=PrefixCacheStats(reset=True))))
    assert backlog.popleft().scheduler_stats.prefix_cache_stats == PrefixCacheStats(reset=True)


@pytest.mark.row("A-085")
async def test_the_outputs_queue_of_a_client_is_an_asyncio_queue_that_merges() -> None:
    outputs = MergingQueue()
    assert isinstance(outputs, asyncio.Queue) and not isinstance(outputs, queue.Queue)
    for step in range(1000):
        outputs.put_nowait(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [step])]))
    outputs.put_nowait(ValueError("the end"))
    assert outputs.qsize() == 65
    tokens: list[int] = []
    while not isinstance(item := await outputs.get(), Exception):
        tokens += item.outputs[0].new_token_ids
    assert tokens == list(range(1000))
    assert outputs.empty()
