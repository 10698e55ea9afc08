"""A step that raises costs the requests at fault; what the others say does not change."""

import random
from collections.abc import Callable

import pytest

from llmkernel.engine.core import EngineCore
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.engine.step_retry import MOST_RETRIES
from llmkernel.errors import LLMKernelError
from llmkernel.protocol.outputs import FinishReason
from tests.engine.harness import Engine, RecordingExecutor


class FaultyExecutor(RecordingExecutor):
    """Raises where `fault` says so, before the step or in its middle: then it has read and written everything."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[SchedulerOutput], bool] = lambda step: False
        self.late = False
        self.runs = 0

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.runs += 1
        if self.fault(step) and not self.late:
            raise OSError("bad luck")
        output = self._run(step)
        if self.fault(step):
            raise OSError("bad luck")
        return output

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        cached = step.scheduled_cached_reqs
        for req_id, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self._requests[req_id]  # as the real worker: tokens that were not taken are dropped
            del request.token_ids[len(request.prompt_token_ids) + count :]
            del request.names[len(request.token_ids) :]
        return super(RecordingExecutor, self).execute_model(step)


def faulty_engine(**args: int) -> tuple[Engine, FaultyExecutor]:
    engine, executor = Engine(**args), FaultyExecutor()
    executor.start(engine.args, lambda *progress: None)
    engine.executor = executor
    engine.core = EngineCore(engine.args, executor, lambda *progress: None)
    return engine, executor


@pytest.mark.parametrize("late", [False, True], ids=["at its start", "at its end"])
@pytest.mark.parametrize("culprits", [{"7"}, {"0"}, {"3", "19"}], ids=lambda ids: " and ".join(sorted(ids)))
def test_the_culprits_are_found_whatever_the_others_are_at(culprits: set[str], late: bool) -> None:
    """Decodes, long prompts in chunks, new requests and resumed ones, in steps that raise again and again."""
    engine, executor = faulty_engine(num_blocks=60, max_num_seqs=24, max_num_batched_tokens=24)
    executor.late = late
    chance = random.Random(1)
    prompts = {str(n): [chance.randrange(1, 90) for _ in range(chance.choice([1, 5, 30]))] for n in range(24)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=9)
    for _ in range(6):
        engine.step()
    before = {name: len(engine.tokens(name)) if name in engine.outputs else 0 for name in culprits}
    executor.fault = lambda step: bool(culprits & step.num_scheduled_tokens.keys())
    engine.run()
    for name, prompt in prompts.items():
        if name in culprits and engine.last(name).finish_reason is FinishReason.ERROR:
            assert engine.last(name).stop_reason == "OSError: bad luck"
            assert engine.tokens(name) == fake_answer(prompt, before[name])
        else:
            assert engine.tokens(name) == fake_answer(prompt, 9)
    assert any(engine.last(name).finish_reason is FinishReason.ERROR for name in culprits)
    assert engine.is_empty() and executor.collective_rpc("held_requests") == [[]]


@pytest.mark.parametrize("late", [False, True])
def test_an_accident_that_does_not_come_again_costs_nobody(late: bool) -> None:
    engine, executor = faulty_engine()
    executor.late = late
    for n in range(8):
        engine.add(str(n), [n + 1] * 5, max_tokens=6)
    bad_runs = {1, 3, 5}
    executor.fault = lambda step: executor.runs in bad_runs
    engine.run()
    assert all(engine.tokens(str(n)) == fake_answer([n + 1] * 5, 6) for n in range(8))


def test_a_step_too_large_for_the_memory_runs_in_parts() -> None:
    engine, executor = faulty_engine()
    for n in range(8):
        engine.add(str(n), [n + 1] * 5, max_tokens=3)
    executor.fault = lambda step: len(step.num_scheduled_tokens) > 2
    engine.run()
    assert all(engine.tokens(str(n)) == fake_answer([n + 1] * 5, 3) for n in range(8))


def test_the_search_is_bounded_and_then_everybody_fails() -> None:
    engine, executor = faulty_engine(num_blocks=300, max_num_seqs=128)
    for n in range(128):
        engine.add(str(n), [n + 1], max_tokens=2)
    executor.fault = lambda step: bool(step.num_scheduled_tokens)
    engine.step()
    assert executor.runs == 1 + MOST_RETRIES
    assert all(engine.last(str(n)).finish_reason is FinishReason.ERROR for n in range(128))
    executor.fault = lambda step: False
    engine.add("later", [1, 2], max_tokens=4)
    engine.run()
    assert engine.tokens("later") == fake_answer([1, 2], 4)
    assert engine.is_empty() and executor.collective_rpc("held_requests") == [[]]


def test_an_executor_that_is_gone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = faulty_engine()
    engine.add("a", [1])
    engine.add("b", [1])
    executor.fault = lambda step: True

    def gone() -> None:
        raise LLMKernelError("the worker is gone")

    monkeypatch.setattr(executor, "check_health", gone)
    with pytest.raises(LLMKernelError, match="the worker is gone"):
        engine.core.step()
    assert executor.runs == 1


def test_a_request_whose_output_cannot_be_taken_in_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    take = engine.core.scheduler._take_tokens

    def broken(request: object, *args: object) -> None:
        if request.request_id == "bad":  # type: ignore[attr-defined]
            raise ZeroDivisionError("in its grammar, say")
        take(request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.core.scheduler, "_take_tokens", broken)
    for name in ("good", "bad"):
        engine.add(name, list(name.encode()), max_tokens=3)
    engine.run()
    assert engine.tokens("good") == fake_answer(b"good", 3)
    assert engine.last("bad").stop_reason == "ZeroDivisionError: in its grammar, say"
    assert engine.is_empty()
