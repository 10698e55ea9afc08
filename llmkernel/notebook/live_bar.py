"""LiveBar: a load as a widget, in as many cells as show it."""

from typing import TYPE_CHECKING

from llmkernel.notebook.load_steps import LoadSteps
from llmkernel.notebook.widgets.frame_clock import FrameClock
from llmkernel.notebook.widgets.load_bar import LoadBar
from llmkernel.notebook.widgets.stop_channel import StopChannel

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["LiveBar"]


class LiveBar:
    """Follows the load of `slot`; when that is over the widget says how it ended, for a page that was reloaded.

    running: the load goes on. close: the browser's half is let go.
    """

    def __init__(self, slot: "ModelSlot", reason: str, stop: StopChannel, clock: FrameClock) -> None:
        self.slot = slot
        self.running = True
        self._clock = clock
        self._steps = LoadSteps(slot, reason)
        self.widget = LoadBar(stop, self._steps.state())
        slot.listeners.append(self._tell)
        clock.add(self)

    def beat(self, *, counters: bool) -> None:
        if counters:
            self.widget.show(self._steps.state())

    def close(self) -> None:
        self._rest()
        self.widget.close()

    def _tell(self) -> None:
        self._steps.take()
        if not self.slot.loading:
            self._rest()
            self.widget.show(self._steps.state())

    def _rest(self) -> None:
        if self.running:
            self.running = False
            self.slot.listeners.remove(self._tell)
            self._clock.remove(self)
