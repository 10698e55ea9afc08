"""Work: something that a session does and that takes time, a load or an unload."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from llmkernel.notebook.cells import Cells, interruptible

__all__ = ["Work"]


class Work:
    """It runs already; await it for its result. Cancelling whoever awaits it ends it, and so does `cancel`."""

    def __init__(
        self,
        task: "asyncio.Task[Any]",
        cells: Cells | None,
        end: Callable[[], str],
        then: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        """`end`: ends the work, and says what became of it. `then`: applied to the result."""
        self._task = task
        self._cells = cells
        self._end = end
        self._then = then
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def done(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        self._end()

    def mapped(self, then: Callable[[Any], Any]) -> "Work":
        """The same work, with `then` applied to its result."""
        return Work(self._task, self._cells, self._end, then)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        return self._then(await interruptible(self._cells, asyncio.shield(self._task), self._give_up))

    async def _give_up(self) -> str:
        return self._end()

    def __repr__(self) -> str:
        return f"<{self._task.get_name()}: {'done' if self.done else 'running'}>"
