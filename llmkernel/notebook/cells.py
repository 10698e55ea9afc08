"""Cells: which cell runs, in which task, and how Interrupt reaches what it awaits."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from llmkernel.notebook.brief_errors import brief

__all__ = ["TICK", "Cells", "interruptible", "is_terminal"]

T = TypeVar("T")

TICK = 0.05
"""Seconds between wake-ups of the loop while somebody waits: a signal alone does not wake a loop that sleeps in epoll,
and ipykernel's handler does not either (measured: Interrupt was seen seconds late)."""


class Cells:
    """The shell's cells, as its events tell them.

    serial: changes with every cell. task: the task that runs the newest cell, None outside of one. interrupted:
    Interrupt (SIGINT) has come and was not raised yet. raw: the newest cell as it was typed. id: the
    newest cell's in its notebook, "" if the front end does not say. shell: the InteractiveShell.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.serial = 0
        self.task: asyncio.Task[Any] | None = None
        self.interrupted = False
        self.raw = ""
        self.id = ""
        self._depth = 0
        self._waiting = 0
        self._previous: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.shell.events.register("pre_run_cell", self._begin)
        self.shell.events.register("post_run_cell", self._end)
        self._begin(None)

    def stop(self) -> None:
        self.shell.events.unregister("pre_run_cell", self._begin)
        self.shell.events.unregister("post_run_cell", self._end)
        self._forget_cell()

    @property
    def count(self) -> int:
        """The execution count of the newest cell, as the page shows it in brackets."""
        return int(self.shell.displayhook.prompt_count)  # when the count itself moves on differs by IPython's version

    @property
    def in_cell_task(self) -> bool:
        """Whether the caller runs in the cell's own task, not in one that the cell started."""
        return self.task is not None and asyncio.current_task() is self.task

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the caller waits for us, Interrupt wakes the loop and cancels the cell."""
        serial = self.serial
        self._loop = asyncio.get_running_loop()
        self._watch_signal()
        self._waiting += 1
        if self._timer is None:
            self._timer = self._loop.call_later(TICK, self._tick)
        try:
            yield
        finally:
            if serial == self.serial:  # else the cell has ended meanwhile, and everything is put back
                self._waiting -= 1
                if not self._waiting and is_terminal(self.shell):
                    self._restore_signal()

    def keep(self, value: object) -> None:
        """Make `value` the shell's `_`, as if the cell had ended with it."""
        self.shell.displayhook.update_user_ns(value)

    def _begin(self, info: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a subshell's cell
        self.raw = getattr(info, "raw_cell", "")
        self.id = getattr(info, "cell_id", None) or ""
        task = None
        with contextlib.suppress(RuntimeError):  # no running loop: the cell is synchronous
            task = asyncio.current_task()
        if self.task is not None and task is self.task:
            self._depth += 1  # a cell that runs a cell, as %%capture does
            return
        self._forget_cell()
        self.serial += 1
        self.task = task
        if task is not None and not is_terminal(self.shell):
            self._loop = task.get_loop()
            self._watch_signal()

    def _end(self, _result: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth:
            self._depth -= 1
        else:
            self._forget_cell()

    def _forget_cell(self) -> None:
        self._restore_signal()
        self._waiting = self._depth = 0
        self.interrupted = False
        self.task = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK, self._tick) if self._loop and self._waiting else None

    def _watch_signal(self) -> None:
        """Put our handler before the one that is there: in a kernel for the whole of an async cell, in a terminal
        while the cell waits for us. Synchronous code is interrupted as ever.
        """
        if self.task is None or self._previous is not None or threading.current_thread() is not threading.main_thread():
            return
        current = signal.getsignal(signal.SIGINT)
        if callable(current) and (is_terminal(self.shell) or current is not signal.default_int_handler):
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)

    def _restore_signal(self) -> None:
        if self._previous is not None and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._previous)
        self._previous = None

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if self._loop is None or self.task is None:
            return
        if self._previous is signal.default_int_handler:  # terminal: unwind the cell instead of the loop
            self._loop.call_soon_threadsafe(self.task.cancel)
            return
        self._previous(signum, frame)
        self._loop.call_soon_threadsafe(_wake)


def _wake() -> None:
    """The call itself has woken the loop."""


async def interruptible(cells: Cells | None, awaitable: Awaitable[T], give_up: Callable[[], Awaitable[str]]) -> T:
    """Await. If that is cancelled, `give_up` ends what runs and says what became of it.

    The cancellation goes on, as KeyboardInterrupt with those words if it was Interrupt that ended the cell. In any
    other task than the cell's own a KeyboardInterrupt would tear down the loop: there it stays a CancelledError.
    """
    with cells.waiting() if cells is not None else contextlib.nullcontext():
        try:
            return await awaitable
        except asyncio.CancelledError:
            words = await give_up()
            task = asyncio.current_task()
            if cells is None or task is None or not (cells.interrupted and cells.in_cell_task):
                raise
            task.uncancel()
            cells.interrupted = False
            raise brief(KeyboardInterrupt(words)) from None


def is_terminal(shell: Any) -> bool:
    """Whether output cannot be updated in place: there is no Jupyter kernel."""
    return getattr(shell, "kernel", None) is None
