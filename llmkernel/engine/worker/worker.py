"""Worker: the model of an engine, from its load to its last step. Called from the engine's main thread only."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.engine.worker.memory import available_memory, resident_memory
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.errors import LLMKernelError

if TYPE_CHECKING:
    from llmkernel.engine.worker.loading import ReadyModel

__all__ = ["Worker"]


class Worker:
    """One model on one device: start() once, then execute_model(); shutdown() gives it all back and is idempotent."""

    def __init__(self, args: EngineArgs, report: ReportProgress) -> None:
        self._args = args
        self._clock = _StageClock(report)
        self._ready: ReadyModel | None = None
        self._calls = {"memory": self._memory, "model_info": self._model_info, "ping": self._ping}

    def start(self) -> ExecutorFacts:
        """Everything between nothing and the first step. Raises what the user can act on, in one line."""
        files = resolve_model(self._args, self._clock.report)  # first: a wrong name or file need not wait for torch
        self._clock.report("importing", 0, 0, "torch")
        from llmkernel.engine.worker.loading import load  # imports torch: a second, a stage of the load

        ready = load(files, self._args, self._clock.report)
        facts = dataclasses.replace(ready.facts, load_timings=self._clock.stop())
        self._ready = dataclasses.replace(ready, facts=facts)
        return facts

    @property
    def num_threads(self) -> int:
        """Torch threads of the last step; 0 before there is a model."""
        return 0 if self._ready is None else self._ready.governor.num_threads

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        ready = self._started()
        ready.governor.begin_step()
        output = ready.runner.execute(step)
        ready.governor.end_step(step.total_num_scheduled_tokens)
        return output

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call by name, from the allow-list: ping, memory, model_info. Plain values come back."""
        if method not in self._calls:
            raise AttributeError(f"The worker has no method {method!r}; it has {', '.join(sorted(self._calls))}.")
        return self._calls[method](*args, **kwargs)

    def shutdown(self) -> None:
        self._ready = None

    def _ping(self) -> str:
        return "pong"

    def _memory(self) -> dict[str, int]:
        """Bytes of this process, of weights, of the whole KV pool, left on the machine; requests that have state."""
        facts = self._started().facts
        return {
            "resident": resident_memory(),
            "weights": facts.model.weights_bytes,
            "kv_cache": facts.kv_cache_bytes,
            "available": available_memory(),
            "requests": self._started().runner.num_requests,
        }

    def _model_info(self) -> dict[str, Any]:
        """ModelFacts as a dict, with what the load took (seconds per stage)."""
        facts = self._started().facts
        return {**msgspec.structs.asdict(facts.model), "load_timings": facts.load_timings}

    def _started(self) -> "ReadyModel":
        if self._ready is None:
            raise LLMKernelError("The worker holds no model; start it first.")
        return self._ready


class _StageClock:
    """Passes progress on and keeps how long each stage took: a stage lasts until the next one is reported."""

    def __init__(self, report: ReportProgress) -> None:
        self._pass_on = report
        self._stage: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def report(self, stage: str, done: int, total: int, detail: str) -> None:
        if stage != self._stage:
            self._close()
            self._stage = stage
        self._pass_on(stage, done, total, detail)

    def stop(self) -> dict[str, float]:
        """Seconds per stage, in the order in which they began."""
        self._close()
        self._stage = None
        return self._seconds

    def _close(self) -> None:
        now = time.monotonic()
        if self._stage is not None:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._since = now
