"""LoadOutput: a load in the output of the cell that started it."""

import asyncio
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmkernel.notebook.live_output import LiveOutput
from llmkernel.notebook.load_line import load_line

if TYPE_CHECKING:
    from llmkernel.notebook.live_bar import LiveBar
    from llmkernel.notebook.live_views import LiveViews
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["LoadOutput"]

_WIDGETS = "llmkernel.notebook.live_views"


class LoadOutput:
    """Shows the load of `slot` until it is over, then the line that stays: no widget is stored.

    live: where the bar comes from; None = a line of text that changes. The bar comes once the widget libraries are
    imported, in a thread while the engine loads: half a second that would stop the loop.
    """

    def __init__(self, shell: Any, slot: "ModelSlot", reason: str, live: "Callable[[], LiveViews] | None") -> None:
        self._slot = slot
        self._reason = reason
        self._output = LiveOutput(shell, self._render)
        self._bar: LiveBar | None = None
        if live is not None and _WIDGETS in sys.modules:
            self._bar = live().load_bar(slot, reason)
        elif live is not None:
            loop = asyncio.get_running_loop()
            self._importing = loop.create_task(self._open_when_imported(live), name="llmkernel-import-widgets")
        self._output.changed()
        slot.listeners.append(self._tell)

    async def _open_when_imported(self, live: "Callable[[], LiveViews]") -> None:
        await asyncio.to_thread(importlib.import_module, _WIDGETS)
        if self._slot.loading:
            self._bar = live().load_bar(self._slot, self._reason)
            self._output.changed()

    def _tell(self) -> None:
        if not self._slot.loading:
            self._slot.listeners.remove(self._tell)
            self._output.finish()
        elif self._bar is None:
            self._output.changed()

    def _render(self) -> tuple[dict[str, Any], dict[str, Any]]:
        data: dict[str, Any] = {"text/plain": load_line(self._slot, self._reason)}
        if self._bar is not None and self._slot.loading:
            data |= self._bar.widget.view_data
        return data, {}
