"""LiveViews: the widgets of a kernel: one beat, one way for Stop, and the models that stay open after their answers."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmkernel.notebook.dashboard import Dashboard
from llmkernel.notebook.live_bar import LiveBar
from llmkernel.notebook.live_view import LiveView
from llmkernel.notebook.widgets.frame_clock import FrameClock
from llmkernel.notebook.widgets.stop_channel import StopChannel

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.model_slot import ModelSlot
    from llmkernel.notebook.session import Session

__all__ = ["KEPT_OPEN", "LiveViews"]

KEPT_OPEN = 64
"""Finished views whose models stay open: a page that is reloaded shows them again."""


class LiveViews:
    """Owns every LiveView, LiveBar and Dashboard, the FrameClock and the StopChannel they share; `close` ends them all.

    on_stop(ids), on_cancel(model): called on whatever thread a click on Stop, or on Cancel of a load, came in on. Use
    it on the kernel's loop.
    """

    def __init__(self, on_stop: Callable[[list[str]], None], on_cancel: Callable[[str], None]) -> None:
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._stop: StopChannel | None = None
        self._clock = FrameClock()
        self._views: dict[str, LiveView] = {}
        self._bars: dict[str, LiveBar] = {}
        self._dashboards: dict[str, Dashboard] = {}

    @property
    def stop(self) -> StopChannel:
        """The one way for Stop."""
        if self._stop is None:
            self._stop = StopChannel(self._on_stop, self._on_cancel)
        return self._stop

    def open(self, shell: Any, generation: "Generation", *, after_load: bool = False) -> LiveView:
        """Show `generation` in the cell that runs now, growing until it has ended. after_load: see LiveView."""
        asyncio.get_running_loop()  # an error here is the caller's: without a loop nothing grows
        view = LiveView(shell, generation, self.stop, self._clock, after_load=after_load)
        self._views[generation.id] = view
        self._close_old()
        return view

    def show(self, shell: Any, generation: "Generation") -> None:
        """Show `generation` as a live view in the cell that runs now, whether it still grows or has ended."""
        view = self._views.get(generation.id)
        if view is not None:
            view.show_again()
        else:
            self.open(shell, generation)

    def load_bar(self, slot: "ModelSlot", reason: str) -> LiveBar:
        """The bar of a load. That of the model's last load, which a reloaded page may still have shown, goes."""
        bar = self._bars.get(slot.name)
        if bar is None or not (bar.running and bar.slot is slot):
            if bar is not None:
                bar.close()
            bar = self._bars[slot.name] = LiveBar(slot, reason, self.stop, self._clock)
        return bar

    def dashboard(self, session: "Session", slot: "ModelSlot") -> Dashboard:
        """The dashboard of `slot`; there is one for each model."""
        found = self._dashboards.get(slot.name)
        if found is None or found.slot is not slot:
            if found is not None:
                found.close()
            found = self._dashboards[slot.name] = Dashboard(session, slot, self.stop)
        return found

    def close(self) -> None:
        for view in self._views.values():
            view.close()
        for bar in self._bars.values():
            bar.close()
        for dashboard in self._dashboards.values():
            dashboard.close()
        self._views.clear()
        self._bars.clear()
        self._dashboards.clear()
        if self._stop is not None:
            self._stop.close()
            self._stop = None

    def _close_old(self) -> None:
        finished = [id for id, view in self._views.items() if view.finished]
        for id in finished[:-KEPT_OPEN]:
            self._views.pop(id).close()
