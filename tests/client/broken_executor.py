"""Executors that break in ways the fake one does not. Imported by the engine process."""

import itertools
from typing import Any

from llmkernel.engine.fake_executor import FakeExecutor


class WorkerGone(RuntimeError):
    pass


class DyingExecutor(FakeExecutor):
    """After a step that raised it says that its worker is gone."""

    def check_health(self) -> None:
        raise WorkerGone("the worker is gone")


class SlowStepExecutor(FakeExecutor):
    """A step that blocks the main thread for 30 s, in native code that lets the GIL go."""

    def execute_model(self, step: Any) -> Any:
        import time

        time.sleep(30)
        return super().execute_model(step)


class GilHoldingExecutor(FakeExecutor):
    """A step that never lets the GIL go."""

    def execute_model(self, step: Any) -> Any:
        return sum(itertools.repeat(0))
