"""Where requests stand that bring no tokens: told when somebody asks, of that client's requests, in words."""

import pytest

from llmkernel.engine.scheduler import progress
from llmkernel.protocol.stats import RequestProgress
from tests.engine.harness import Engine

LONG = list(range(1, 41))  # 40 tokens, 10 blocks


def told(engine: Engine, client_index: int = 0) -> dict[str, RequestProgress]:
    answer = engine.core.call_utility("get_request_progress", [client_index])
    return {one.request_id: one for one in answer}


@pytest.mark.row("A-147", "A-148")
def test_how_much_of_a_prompt_has_been_read() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("reader", LONG, max_tokens=2)
    assert told(engine)["reader"] == RequestProgress("reader", 1, "", 0, 40)
    seen = []
    while not engine.tokens("reader"):
        engine.step()
        seen += [(one.position, one.num_computed_tokens, one.num_tokens) for one in told(engine).values()]
    assert seen == [(0, 16, 40), (0, 32, 40)]
    engine.step()
    assert told(engine) == {}, "one that decodes is told of by its tokens"


def test_a_cached_prefix_is_told_with_the_first_chunk() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("first", LONG[:20], max_tokens=1)
    engine.run()
    engine.add("again", LONG, max_tokens=1)
    engine.step()
    assert told(engine)["again"] == RequestProgress("again", 0, "", 36, 40, 20)


def test_the_place_in_the_queue_and_why_its_head_waits() -> None:
    engine = Engine(num_blocks=13, max_num_batched_tokens=64)
    engine.add("a", LONG[:8], max_tokens=30)
    engine.step()
    engine.add("b", range(50, 90), max_tokens=4)
    engine.add("c", [3], max_tokens=1)
    engine.step()
    waiting = told(engine)
    assert [(one.position, one.reason) for one in waiting.values()] == [(1, "needs 10 blocks, 9 free"), (2, "")]


def test_everybody_who_is_passed_over_has_a_reason_of_his_own() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.add("first", LONG[:16], max_tokens=9)
    engine.add("twin", LONG[:16], max_tokens=9)
    engine.add("triplet", LONG[:16], max_tokens=9)
    engine.step()
    reasons = [one.reason for one in told(engine).values()]
    assert reasons == ["shares a prefix that is being computed in this step"] * 2


def test_order_is_the_policys() -> None:
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("run", 0), ("late", 9), ("soon", 1)):
        engine.add(name, [1, 2, 3], max_tokens=5, priority=priority)
    engine.step()
    assert {one.request_id: one.position for one in told(engine).values()} == {"soon": 1, "late": 2}


def test_a_preempted_request_waits_again_and_says_how_often() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=4)
    for name in "abc":
        engine.add(name, [ord(name)] * 7, max_tokens=12)
    again = {}
    while engine.core.has_requests():
        engine.step()
        again |= {one.request_id: one for one in told(engine).values() if one.num_preemptions}
    assert again and all(one.num_tokens > 7 for one in again.values()), "the answer so far is read again, too"


def test_paused_between_steps_is_a_reason() -> None:
    engine = Engine()
    engine.core.call_utility("pause_scheduler", ["keep"])
    engine.add("a", [1], max_tokens=1)
    assert told(engine)["a"].reason == "the engine is paused"


def test_a_client_hears_of_its_own_requests_only() -> None:
    engine = Engine(max_num_seqs=1)
    for name, client_index in (("mine", 0), ("theirs", 7), ("next", 0)):
        engine.add(name, [1], client_index=client_index, max_tokens=3)
    assert {one.request_id: one.position for one in told(engine).values()} == {"mine": 1, "next": 3}
    assert {one.request_id: one.position for one in told(engine, 7).values()} == {"theirs": 2}


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MOST_TOLD", 3)
    engine = Engine()
    for number in range(9):
        engine.add(str(number), [number], max_tokens=1)
    assert list(told(engine)) == ["0", "1", "2"]
