"""Executor: what runs the model for EngineCore. UniProcExecutor runs it in the engine's own process."""

import abc
import importlib
from collections.abc import Sequence
from typing import Any

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor", "UniProcExecutor", "resolve_executor_class"]


class Executor(abc.ABC):
    """One model on one device or many. Every method is called from the engine's main thread."""

    @abc.abstractmethod
    def start(self, args: EngineArgs, report: ReportProgress) -> ExecutorFacts:
        """Load the model, make the KV pool, warm up. Raises what the user can act on."""

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""

    @property
    def num_threads(self) -> int:
        """The worker's threads in the last step; 0 where nobody counts them."""
        return 0

    @abc.abstractmethod
    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call `method` (of an allow-list) on every worker; one result per worker."""

    @abc.abstractmethod
    def check_health(self) -> None:
        """Raise if a worker is gone."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Give everything back; idempotent."""


class UniProcExecutor(Executor):
    """The worker in the engine process itself."""

    def __init__(self) -> None:
        self._worker: Any = None

    def start(self, args: EngineArgs, report: ReportProgress) -> ExecutorFacts:
        from llmkernel.engine.worker.worker import Worker  # imports torch: only the engine process pays for it

        self._worker = Worker(args, report)
        return self._worker.start()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute_model(step)

    @property
    def num_threads(self) -> int:
        return self._worker.num_threads if self._worker is not None else 0

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return [self._worker.call(method, *args, **(kwargs or {}))]

    def check_health(self) -> None:
        """The worker shares this process: it lives while we do."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def resolve_executor_class(path: str | None) -> type[Executor]:
    """The class at import path "module:Class"; None is UniProcExecutor."""
    if path is None:
        return UniProcExecutor
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise TypeError(f"{path} is not an Executor.")
    return found
