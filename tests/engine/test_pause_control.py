import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import InvalidRequestError, LLMKernelError
from llmkernel.protocol.outputs import FinishReason
from tests.engine.harness import Engine


def three(policy: str = "fcfs", **args) -> Engine:
    """Two run, one waits."""
    engine = Engine(max_num_seqs=2, scheduling_policy=policy, **args)
    for name in "abc":
        engine.add(name, [ord(name)] * 5, max_tokens=5)
    engine.step()
    return engine


def test_abort_ends_everything_and_answers_after_the_last_output() -> None:
    engine = three()
    promise = engine.core.call_utility("pause_scheduler", ["abort"])
    said = []
    while not promise.done():
        assert engine.core.has_requests(), "the caller must go on stepping"
        said += engine.step()
    assert {output.request_id: output.finish_reason for output in said} == dict.fromkeys("abc", FinishReason.ABORT)
    assert promise.result() is None
    assert engine.is_empty() and not engine.core.has_requests()
    assert engine.pool.num_cached_hashes == 0


def test_wait_lets_those_who_began_end_and_holds_new_ones() -> None:
    engine = three()
    promise = engine.core.call_utility("pause_scheduler", ["wait", False])
    while not promise.done():
        engine.step()
    assert engine.tokens("a") == fake_answer([97] * 5, 5)
    assert engine.tokens("b") == fake_answer([98] * 5, 5)
    assert engine.tokens("c") == []
    assert engine.core.has_unfinished_requests() and not engine.core.has_requests(), "nothing to do, so no spinning"
    assert engine.core.call_utility("get_stats")["waiting_head"]["reason"] == "the engine is paused for new requests"
    assert engine.pool.num_cached_hashes > 0
    engine.core.call_utility("resume_scheduler")
    engine.run()
    assert engine.tokens("c") == fake_answer([99] * 5, 5)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_wait_includes_those_who_were_preempted(policy: str) -> None:
    engine = Engine(num_blocks=6, scheduling_policy=policy, max_num_seqs=2)
    engine.add("a", [1] * 7, max_tokens=8)
    engine.add("b", [2] * 7, max_tokens=8, priority=3)
    engine.step()
    engine.add("first", [3], max_tokens=2, priority=-5)  # stands before b under the priority policy
    engine.core.call_utility("pause_scheduler", ["wait"])
    engine.run()
    assert any(step.preempted_req_ids for step in engine.executor.steps)
    assert engine.tokens("a") == fake_answer([1] * 7, 8)
    assert engine.tokens("b") == fake_answer([2] * 7, 8)
    assert engine.tokens("first") == []
    engine.core.call_utility("resume_scheduler")
    engine.run()
    assert engine.tokens("first") == fake_answer([3], 2)


def test_wait_finds_the_preempted_one_behind_a_long_queue() -> None:
    engine = Engine(num_blocks=6, scheduling_policy="priority", max_num_seqs=2)
    engine.add("a", [1] * 7, max_tokens=8)
    engine.add("b", [2] * 7, max_tokens=8, priority=3)
    engine.step()
    for index in range(10):
        engine.add(str(index), [3], max_tokens=2, priority=-5)
    promise = engine.core.call_utility("pause_scheduler", ["wait"])
    engine.run()
    assert promise.done()
    assert engine.tokens("b") == fake_answer([2] * 7, 8)
    assert len(engine.core.scheduler.waiting) == 10


def test_abort_of_those_who_never_ran_is_told_before_the_answer() -> None:
    engine = Engine()
    engine.add("a", [1])
    promise = engine.core.call_utility("pause_scheduler", ["abort"])
    assert promise is not None and not promise.done()
    engine.step()
    assert engine.last("a").finish_reason is FinishReason.ABORT
    engine.run()
    assert promise.done()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep_freezes_and_resume_goes_on_where_it_was(clear_cache: bool) -> None:
    engine = three()
    assert engine.core.call_utility("pause_scheduler", ["keep", clear_cache]) is None
    engine.run(limit=3)
    assert engine.core.has_unfinished_requests()
    assert [len(engine.tokens(name)) for name in "abc"] == [1, 1, 0]
    assert (engine.pool.num_used_blocks == 0) is clear_cache
    engine.add("d", [7], max_tokens=1)
    assert not engine.core.has_requests()
    engine.core.call_utility("resume_scheduler")
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == fake_answer([ord(name)] * 5, 5)
    assert engine.tokens("d") == fake_answer([7], 1)


def test_what_is_frozen_can_be_aborted() -> None:
    engine = three()
    engine.core.call_utility("pause_scheduler", ["keep", False])
    engine.core.abort_requests(["a", "c"])
    engine.run(limit=3)
    assert engine.last("a").finish_reason is engine.last("c").finish_reason is FinishReason.ABORT
    assert engine.executor.collective_rpc("held_requests") == [["b"]]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_idle_engine_is_paused_at_once(mode: str) -> None:
    core = Engine().core
    assert core.call_utility("pause_scheduler", [mode]) is None
    assert core.call_utility("is_scheduler_paused") and core.call_utility("is_sleeping")
    core.call_utility("resume_scheduler")
    assert not core.call_utility("is_scheduler_paused")


def test_an_unknown_mode_is_refused() -> None:
    engine = three()
    with pytest.raises(InvalidRequestError, match="mode = 'now' must be one of abort, wait, keep"):
        engine.core.call_utility("pause_scheduler", ["now"])
    assert not engine.core.call_utility("is_scheduler_paused")


@pytest.mark.parametrize("end", ["resume", "shutdown"])
def test_a_pause_that_cannot_complete_is_failed(end: str) -> None:
    engine = three()
    promise = engine.core.call_utility("pause_scheduler", ["wait"])
    (engine.core.resume_scheduler if end == "resume" else engine.core.shutdown)()
    with pytest.raises(LLMKernelError, match="before the pause was complete"):
        promise.result(timeout=0)
