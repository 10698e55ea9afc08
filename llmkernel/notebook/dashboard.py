"""Dashboard: what an engine does now, live: `%llm dashboard`, or an object to place anywhere."""

import asyncio
import time
import weakref
from typing import TYPE_CHECKING, Any

import psutil

from llmkernel.notebook.dashboard_rows import DashboardRows
from llmkernel.notebook.request_trace import hops_of
from llmkernel.notebook.widgets.dashboard_view import DashboardView
from llmkernel.notebook.widgets.engine_history import EngineHistory
from llmkernel.notebook.widgets.messages import Hop
from llmkernel.notebook.widgets.stop_channel import StopChannel

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot
    from llmkernel.notebook.session import Session

__all__ = ["Dashboard"]

INTERVAL = 0.25
_LOG_LINES = 12


class Dashboard:
    """Watches `slot`, a model of `session`, from the first time that it is shown until `close` or the model's end.

    Nothing is measured before that, and nothing is asked of the engine: the figures are those that travel with its
    outputs (SchedulerStats, IterationStats), and the system's about its process. widget: an ipywidgets widget.
    """

    def __init__(self, session: "Session", slot: "ModelSlot", stop: StopChannel) -> None:
        self._session = weakref.ref(session)
        self.slot = slot
        self._history = EngineHistory(time.monotonic())
        self._rows = DashboardRows(slot)
        self.widget = DashboardView(slot.name, stop, self._everything, self._way)
        slot.llm.stat_listeners.append(self._history.record)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="llmkernel-dashboard")

    def close(self) -> None:
        """Stop watching and let the widget go; idempotent."""
        self._task.cancel()
        self._stop_listening()
        self.widget.close()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)

    async def _run(self) -> None:
        try:
            while (session := self._session()) is not None and self.slot.state != "unloaded":
                sample = self._history.sample(time.monotonic(), **self._process())
                self.widget.add(self._state(), sample, self._rows.changed(session.generations), self._log())
                del session
                await asyncio.sleep(INTERVAL)
        finally:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._history.record in self.slot.llm.stat_listeners:
            self.slot.llm.stat_listeners.remove(self._history.record)

    def _everything(self) -> tuple[str, Any, Any, list[str]]:
        session = self._session()
        rows = self._rows.all(session.generations) if session is not None else []
        return self._state(), self._history.samples, rows, self._log()

    def _state(self) -> str:
        health = self.slot.llm.health
        return self.slot.state if health.state == "ok" else f"{self.slot.state}, {health}"

    def _way(self, request_id: str) -> list[Hop]:
        session = self._session()
        feed = self._rows.find(session.generations, request_id) if session is not None else None
        return hops_of(feed) if feed is not None else []

    def _process(self) -> dict[str, Any]:
        facts = self.slot.facts
        if facts is not None:
            try:
                process = psutil.Process(facts.pid)
                times = process.cpu_times()
                return {"memory": process.memory_info().rss, "cpu_seconds": times.user + times.system}
            except psutil.Error:
                pass  # it has just ended: the state says so
        return {"memory": 0, "cpu_seconds": 0.0}

    def _log(self) -> list[str]:
        process = self.slot.process
        return process.log_tail(_LOG_LINES).splitlines() if process is not None else []
