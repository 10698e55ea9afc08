"""The rules of schedule(), seen from outside: what the executor is told, and what clients hear."""

import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.request import MOST_EVENTS
from llmkernel.protocol.outputs import EngineCoreEventType, FinishReason
from tests.engine.harness import Engine, reference_answer

LONG = list(range(1, 41))  # 40 tokens, 10 blocks


def scheduled(engine: Engine) -> dict[str, int]:
    return engine.last_step.num_scheduled_tokens


@pytest.mark.row("A-007", "A-015")
def test_one_request_from_add_to_its_last_token() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=5)
    engine.run()
    assert engine.tokens("a") == fake_answer([1, 2, 3], 5)
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert engine.is_empty()


@pytest.mark.row("A-063")
def test_every_step_tells_its_tokens_at_once() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=3)
    engine.add("b", [2], max_tokens=2)
    said = [[(output.request_id, len(output.new_token_ids)) for output in engine.step()] for _ in range(3)]
    assert said == [[("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1)]]


def test_a_long_prompt_is_read_in_chunks_beside_those_who_decode() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("talker", [7], max_tokens=8)
    engine.step()
    engine.add("reader", LONG, max_tokens=2)
    steps = []
    while not engine.tokens("reader"):
        assert [output.request_id for output in engine.step()][:1] == ["talker"]
        steps.append(scheduled(engine))
    assert steps == [{"talker": 1, "reader": 15}, {"talker": 1, "reader": 15}, {"talker": 1, "reader": 10}]
    engine.run()
    assert engine.tokens("reader") == fake_answer(LONG, 2)


def test_a_partial_prefill_says_nothing() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", LONG)
    assert engine.step() == [] and engine.step() == []
    assert len(engine.step()) == 1


def test_running_requests_come_before_waiting_ones() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", list(range(12)), max_tokens=4)
    engine.add("b", [50], max_tokens=4)
    engine.step()
    assert scheduled(engine) == {"a": 8}
    engine.step()
    assert scheduled(engine) == {"a": 4, "b": 1}
    assert list(scheduled(engine)) == ["a", "b"]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 2048])
def test_chunk_sizes_do_not_change_the_answer(chunk: int) -> None:
    engine = Engine(max_num_batched_tokens=chunk)
    for index in range(5):
        engine.add(str(index), LONG[: 8 * index + 1], max_tokens=6)
    engine.run()
    for index in range(5):
        assert engine.tokens(str(index)) == fake_answer(LONG[: 8 * index + 1], 6)


def test_max_num_seqs_bounds_who_runs_and_says_so() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, [ord(name)], max_tokens=3)
    engine.step()
    assert scheduled(engine) == {"a": 1, "b": 1}
    head = engine.stats[-1].waiting_head
    assert (head.request_id, head.reason) == ("c", "2 requests run, the most at once (max_num_seqs)")
    engine.run()
    assert engine.tokens("c") == fake_answer([ord("c")], 3)


def test_nobody_runs_who_could_not_get_a_token() -> None:
    """With a budget smaller than max_num_seqs the last of those who run would starve."""
    engine = Engine(max_num_seqs=64, max_num_batched_tokens=4)
    for index in range(8):
        engine.add(str(index), [index + 1], max_tokens=10)
    while engine.core.has_requests():
        engine.step()
        running = [request.request_id for request in engine.core.scheduler.running]
        assert len(running) <= 4
        assert scheduled(engine).keys() >= set(running)
    assert engine.core.ready.max_num_seqs == 4


def test_the_budget_is_a_reason_to_wait() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", LONG)
    engine.add("b", [99])
    engine.step()
    assert engine.stats[-1].waiting_head.reason == "prefill budget used (16 tokens a step)"


def test_the_whole_sequence_must_fit_before_a_request_is_admitted() -> None:
    engine = Engine(num_blocks=13, max_num_batched_tokens=16)
    engine.add("a", LONG[:8], max_tokens=30)
    engine.step()
    engine.add("b", [*range(50, 90)], max_tokens=4)  # needs 10 blocks, its first chunk only 4
    engine.step()
    assert scheduled(engine) == {"a": 1}
    assert engine.stats[-1].waiting_head.reason == "needs 10 blocks, 9 free"
    engine.run()
    assert engine.tokens("b") == fake_answer(range(50, 90), 4)


def test_some_blocks_are_kept_for_those_who_run() -> None:
    engine = Engine(num_blocks=202)  # 1 % of 201 is 2
    engine.add("a", [1], max_tokens=40)
    engine.step()
    engine.add("b", list(range(200)) * 3 + list(range(197)), max_tokens=1)  # 200 blocks, as many as are free
    engine.step()
    assert engine.stats[-1].waiting_head.reason == "needs 200 blocks, 200 free (2 kept for running requests)"
    engine.run()
    assert engine.last("b").finish_reason is FinishReason.LENGTH


def test_nothing_is_kept_when_nobody_runs() -> None:
    engine = Engine(num_blocks=202)
    engine.add("b", list(range(200)) * 4, max_tokens=1)  # 200 blocks of 201
    engine.step()
    assert engine.tokens("b") == fake_answer(list(range(200)) * 4, 1)


def test_one_request_may_fill_the_whole_pool_and_ends_there() -> None:
    engine = Engine(num_blocks=5)  # 16 tokens
    assert engine.core.ready.max_model_len == 17
    engine.add("a", [1, 2, 3], max_tokens=100)
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert engine.tokens("a") == fake_answer([1, 2, 3], 14)
    assert engine.stats[-1].num_preempted == 0


def test_requests_that_together_need_more_than_the_pool_all_get_through() -> None:
    engine = Engine(num_blocks=8)
    for index in range(4):
        engine.add(str(index), [index + 1] * 5, max_tokens=20)
    engine.run()
    for index in range(4):
        assert engine.tokens(str(index)) == fake_answer([index + 1] * 5, 20)
    assert engine.is_empty()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_victim_and_its_return(policy: str) -> None:
    """Three requests fill the pool; the first that needs a block takes it from the victim of the policy."""
    engine = Engine(num_blocks=7, scheduling_policy=policy)
    for name, priority in (("a", 1), ("b", 2), ("c", 0)):
        engine.add(name, [ord(name)] * 7, max_tokens=12, priority=priority)
    engine.step()
    assert scheduled(engine) == {"a": 7, "b": 7, "c": 7}
    while not engine.last_step.preempted_req_ids:
        engine.step()
    assert engine.last_step.preempted_req_ids == ({"c"} if policy == "fcfs" else {"b"})
    (victim,) = engine.last_step.preempted_req_ids
    assert engine.stats[-1].num_preempted == 1
    assert engine.stats[-1].waiting_head.reason == "KV memory is short, 1 preempted in this step"
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == fake_answer([ord(name)] * 7, 12)
    kinds = [event.type for output in engine.outputs[victim] for event in output.events or ()]
    assert kinds.count(EngineCoreEventType.PREEMPTED) == kinds.count(EngineCoreEventType.SCHEDULED) - 1 >= 1


def test_a_preempted_request_is_next() -> None:
    engine = Engine(num_blocks=5)
    engine.add("a", [1] * 7, max_tokens=5)
    engine.add("b", [2] * 7, max_tokens=5)
    engine.step()
    engine.add("c", [3], max_tokens=5)
    while not engine.last_step.preempted_req_ids:
        engine.step()
    assert [request.request_id for request in engine.core.scheduler.waiting] == ["b", "c"]


def test_a_resumed_request_is_told_with_all_its_blocks() -> None:
    engine = Engine(num_blocks=5, enable_prefix_caching=False)
    engine.add("a", [1] * 7, max_tokens=3)
    engine.add("b", [2] * 7, max_tokens=3)
    while not any(step.scheduled_cached_reqs.resumed_req_ids for step in engine.executor.steps):
        engine.step()
    cached = engine.last_step.scheduled_cached_reqs
    assert cached.req_ids == ["b"] and cached.resumed_req_ids == {"b"}
    assert cached.num_computed_tokens == [0] and cached.num_output_tokens == [2]
    assert len(cached.new_block_ids[0]) == 3
    assert scheduled(engine) == {"b": 9}, "prompt and output are computed again"


def test_budget_of_a_victim_that_was_scheduled_already_goes_to_the_others() -> None:
    """low gets its token, then loses its blocks to high; the reader's chunk grows by the token that comes back."""
    engine = Engine(num_blocks=6, max_num_batched_tokens=4, scheduling_policy="priority", enable_prefix_caching=False)
    for name, priority in (("low", 9), ("high", 0)):
        engine.add(name, [ord(name[0])], max_tokens=16, priority=priority)
        engine.step()
    engine.add("reader", [3] * 9, max_tokens=1, priority=5)
    engine.step()
    assert scheduled(engine) == {"low": 1, "high": 1, "reader": 2}
    while not engine.last_step.preempted_req_ids:
        engine.step()
    assert engine.last_step.preempted_req_ids == {"low"}
    assert scheduled(engine) == {"high": 1, "reader": 3}
    engine.run()
    assert engine.tokens("low") == fake_answer([ord("l")], 16)
    assert engine.tokens("high") == fake_answer([ord("h")], 16)
    assert engine.tokens("reader") == fake_answer([3] * 9, 1)


@pytest.mark.row("A-070")
def test_priority_decides_who_is_admitted() -> None:
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        engine.add(name, [ord(name[0])], max_tokens=1, priority=priority)
    order = []
    while engine.core.has_requests():
        order += [output.request_id for output in engine.step()]
    assert order == ["early", "middle", "late"]


# Prefix caching.


@pytest.mark.row("A-112")
def test_the_second_request_reads_the_first_ones_prefix() -> None:
    engine = Engine()
    engine.add("a", LONG, max_tokens=2)
    engine.run()
    engine.add("b", [*LONG, 99], max_tokens=2)
    engine.step()
    assert scheduled(engine) == {"b": 1}
    stats = engine.outputs["b"][0].prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (41, 40, 1)
    engine.run()
    assert engine.tokens("b") == fake_answer([*LONG, 99], 2)
    assert sum(stats.prefix_cache_stats.hits for stats in engine.stats) == 40


def test_a_second_turn_reads_the_answer_of_the_first() -> None:
    engine = Engine()
    engine.add("a", LONG, max_tokens=9)
    engine.run()
    turn = [*LONG, *engine.tokens("a"), 1, 2, 3]
    engine.add("b", turn, max_tokens=1)
    engine.step()
    assert engine.outputs["b"][0].prefill_stats.num_cached_tokens == 48, "8 of the 9 tokens: the last has no KV"


def test_equal_prompts_that_arrive_together_are_read_once() -> None:
    engine = Engine(num_blocks=64)
    for index in range(4):
        engine.add(str(index), LONG, max_tokens=4)
    engine.step()
    assert scheduled(engine) == {"0": 40}
    assert engine.stats[-1].num_skipped_waiting_reqs == 3
    assert engine.stats[-1].waiting_head.reason == "shares a prefix that is being computed in this step"
    engine.step()
    assert scheduled(engine) == {"0": 1, "1": 4, "2": 4, "3": 4}
    engine.run()
    assert all(engine.tokens(str(index)) == fake_answer(LONG, 4) for index in range(4))


def test_a_long_queue_is_not_searched_to_its_end() -> None:
    engine = Engine(num_blocks=64, max_num_seqs=3)
    for index in range(20):
        engine.add(str(index), LONG, max_tokens=2)
    engine.step()
    assert engine.stats[-1].num_skipped_waiting_reqs == 3
    engine.run()
    assert all(engine.tokens(str(index)) == fake_answer(LONG, 2) for index in range(20))


def test_others_pass_a_request_that_waits_for_a_prefix() -> None:
    engine = Engine(num_blocks=64)
    engine.add("a", LONG, max_tokens=2)
    engine.add("b", LONG, max_tokens=2)
    engine.add("c", [99], max_tokens=2)
    engine.step()
    assert scheduled(engine) == {"a": 40, "c": 1}
    engine.step()
    assert scheduled(engine) == {"a": 1, "c": 1, "b": 4}


def test_prefix_caching_off_reads_everything() -> None:
    engine = Engine(enable_prefix_caching=False)
    for index in range(2):
        engine.add(str(index), LONG[:12], max_tokens=2)
    engine.step()
    assert scheduled(engine) == {"0": 12, "1": 12}
    engine.run()
    assert engine.stats[-1].prefix_cache_stats is None
    assert not engine.core.ready.enable_prefix_caching


def test_a_resumed_request_finds_its_own_blocks() -> None:
    engine = Engine(num_blocks=7)
    engine.add("a", [1] * 8, max_tokens=8)
    engine.add("b", [2] * 8, max_tokens=8)
    engine.run()
    assert sum(stats.num_preempted for stats in engine.stats) == 1
    assert sum(stats.prefix_cache_stats.preempted_hits for stats in engine.stats) > 0
    assert sum(stats.prefix_cache_stats.preempted_requests for stats in engine.stats) == 1
    assert engine.tokens("b") == fake_answer([2] * 8, 8)
    assert engine.outputs["b"][0].prefill_stats.num_cached_tokens == 0


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """Its own blocks, found again after preemption in the middle of the prompt, are no hit of the user's prompt."""
    engine = Engine(num_blocks=7, max_num_batched_tokens=2)
    engine.add("talker", [99], max_tokens=14)
    engine.step()
    engine.add("reader", LONG[:17], max_tokens=1)
    engine.run()
    told = {id_ for step in engine.executor.steps for id_ in step.preempted_req_ids}
    assert told == {"reader"}
    assert sum(stats.prefix_cache_stats.preempted_hits for stats in engine.stats) == 8
    stats = engine.last("reader").prefill_stats
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (0, 17)


# Aborts, and what outlives a request.


@pytest.mark.row("A-053")
def test_finished_ids_are_told_once_even_when_nothing_else_is_to_do() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=1)
    assert engine.core.scheduler.has_requests()
    engine.step()
    assert not engine.core.has_unfinished_requests()
    assert engine.core.scheduler.has_requests() and engine.core.has_requests(), "the executor still holds it"
    assert engine.executor.collective_rpc("held_requests") == [["a"]]
    engine.step()
    assert engine.last_step.finished_req_ids == {"a"} and engine.last_step.total_num_scheduled_tokens == 0
    assert engine.executor.collective_rpc("held_requests") == [[]]
    assert not engine.core.scheduler.has_requests() and not engine.core.has_requests()
    assert engine.core.step() == {}


def test_a_request_that_never_ran_is_not_told_to_the_executor() -> None:
    engine = Engine()
    engine.add("a", [1])
    engine.core.abort_requests(["a"])
    engine.run()
    assert all(not step.finished_req_ids for step in engine.executor.steps)
    assert engine.last("a").finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "preempted", "finished", "unknown"])
def test_an_abort_at_any_stage_ends_the_stream_once(stage: str) -> None:
    engine = Engine(num_blocks=7, max_num_batched_tokens=16, max_num_seqs=2)
    if stage != "unknown":
        if stage in ("waiting", "preempted"):
            engine.add("other", [9] * 14, max_tokens=9)
            engine.step()
        if stage == "waiting":
            engine.add("another", [8], max_tokens=9)
        engine.add("a", [1] * (20 if stage == "prefill" else 6), max_tokens=1 if stage == "finished" else 8)
        for _ in range({"waiting": 1, "prefill": 1, "decode": 2}.get(stage, 0)):
            engine.step()
        while stage == "preempted" and "a" not in engine.last_step.preempted_req_ids:
            engine.step()
        while stage == "finished" and engine.core.has_requests():
            engine.step()
    for _ in range(3):
        engine.core.abort_requests(["a", "a"])
        engine.check()
    engine.run()
    ends = [output for output in engine.outputs.get("a", ()) if output.finished]
    expected = {"finished": [FinishReason.LENGTH], "unknown": []}.get(stage, [FinishReason.ABORT])
    assert [output.finish_reason for output in ends] == expected
    assert engine.is_empty()
    assert engine.executor.collective_rpc("held_requests") == [[]]


def test_neighbours_of_an_aborted_request_go_on() -> None:
    engine = Engine()
    for name in "abc":
        engine.add(name, [ord(name)], max_tokens=6)
    engine.step()
    engine.core.abort_requests(["b"])
    engine.run()
    for name in "ac":
        assert engine.tokens(name) == fake_answer([ord(name)], 6)
    assert len(engine.tokens("b")) == 1


def test_the_output_of_a_request_aborted_while_it_ran_is_dropped() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=5)
    engine.add("b", [2], max_tokens=5)
    scheduler = engine.core.scheduler
    step = scheduler.schedule()
    output = engine.executor.execute_model(step)
    engine.core.abort_requests(["a"])
    scheduler.update_from_output(step, output)
    (message,) = scheduler.outbox.take().values()
    assert [(o.request_id, o.new_token_ids) for o in message.outputs] == [("a", []), ("b", fake_answer([2], 1))]
    engine.run()
    assert engine.tokens("b") == fake_answer([2], 5)[1:]
    assert engine.is_empty()


def test_an_output_never_goes_to_a_namesake() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=5)
    step = engine.core.scheduler.schedule()
    output = engine.executor.execute_model(step)
    engine.core.abort_requests(["a"])
    namesake = engine.add("a", [2], max_tokens=5)
    engine.core.scheduler.update_from_output(step, output)
    assert namesake.output_token_ids == []
    engine.core.scheduler.outbox.take()
    engine.run()
    assert engine.tokens("a") == fake_answer([2], 5)


def test_an_id_can_be_used_again_once_it_is_free() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=3)
    engine.step()
    engine.core.abort_requests(["a"])
    engine.add("a", [2], max_tokens=2)
    (message,) = engine.core.step().values()
    assert engine.last_step.finished_req_ids == {"a"}, "told in the very step in which it is new again"
    assert [new.req_id for new in engine.last_step.scheduled_new_reqs] == ["a"]
    assert [output.finished for output in message.outputs] == [True, False]


# What is told.


def test_events_and_their_times() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1], max_tokens=2)
    engine.add("b", [2], max_tokens=1)
    engine.run()
    first, second = engine.outputs["a"]
    kinds = [EngineCoreEventType.RECEIVED, EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    assert [event.type for event in first.events] == kinds
    assert second.events is None
    received, queued, started = engine.outputs["b"][0].events
    assert received.timestamp < queued.timestamp < first.events[2].timestamp < started.timestamp


def test_a_prompt_read_in_chunks_tells_how_far_it_was_after_each_but_the_last() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("first", LONG, max_tokens=1)
    engine.run()
    engine.add("again", LONG, max_tokens=2)
    engine.run()
    told = [(event.type, event.tokens) for event in engine.outputs["first"][0].events]
    assert told[3:] == [(EngineCoreEventType.PREFILLED, 16), (EngineCoreEventType.PREFILLED, 32)]
    cached = [
        event.tokens for event in engine.outputs["again"][0].events if event.type == EngineCoreEventType.SCHEDULED
    ]
    assert cached == [36], "the last block is computed again, for the first token"


def test_of_a_very_long_prompt_the_first_chunks_are_told() -> None:
    engine = Engine(max_num_batched_tokens=1, num_blocks=64)
    engine.add("a", list(range(200)), max_tokens=1)
    engine.run()
    assert len(engine.outputs["a"][0].events) == MOST_EVENTS


def test_prefill_stats_are_told_once() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", LONG, max_tokens=4)
    engine.run()
    told = [output.prefill_stats for output in engine.outputs["a"]]
    assert told[0].num_prompt_tokens == told[0].num_computed_tokens == 40
    assert told[1:] == [None] * 3


@pytest.mark.row("A-101", "A-148")
def test_scheduler_stats_describe_the_step() -> None:
    engine = Engine(num_blocks=21, max_num_seqs=1)
    engine.add("a", [1] * 10, max_tokens=2)
    engine.add("b", [2] * 10, max_tokens=2)
    engine.step()
    stats = engine.stats[-1]
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_counter) == (1, 1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_batched_tokens) == (20, 17, 10)
    assert stats.kv_cache_usage == pytest.approx(3 / 20)
    assert stats.step_time > 0
    assert stats.prefix_cache_stats.queries == 10
    engine.run()
    last = engine.stats[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage, last.waiting_head) == (0, 0, 0.0, None)


def test_statistics_can_be_off() -> None:
    engine = Engine(log_stats=False)
    engine.add("a", [1], max_tokens=2)
    engine.run()
    assert engine.stats == [] and engine.tokens("a") == fake_answer([1], 2)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"max_tokens": 30}, "eos_every=5"),
        ({"max_tokens": 30, "min_tokens": 20}, "eos_every=3"),
        ({"max_tokens": 30, "stop_token_ids": list(range(97, 105))}, ""),
        ({"max_tokens": 30, "stop_token_ids": list(range(97, 105)), "min_tokens": 7}, ""),
        ({"max_tokens": 9}, "eos_every=13"),
    ],
)
def test_answers_end_where_the_reference_ends(options: dict, settings: str) -> None:
    engine = Engine(settings)
    eos_every = int(settings.partition("=")[2] or 0)
    for index in range(10):
        engine.add(str(index), [index + 1, 3], **options)
    engine.run()
    reasons = set()
    for index in range(10):
        expected, reason = reference_answer([index + 1, 3], eos_every=eos_every, **options)
        assert (engine.tokens(str(index)), engine.last(str(index)).finish_reason) == (expected, reason)
        stops = set(options.get("stop_token_ids", ())) & {expected[-1]}
        assert engine.last(str(index)).stop_reason == (stops.pop() if stops and reason is FinishReason.STOP else None)
        reasons.add(reason)
    assert FinishReason.STOP in reasons
