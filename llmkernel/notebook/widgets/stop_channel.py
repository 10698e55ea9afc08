"""StopChannel: how a click on Stop reaches the kernel, also while a cell blocks its main thread (design D8)."""

from collections.abc import Callable
from typing import Any

import ipywidgets

from llmkernel.notebook.widgets.messages import Cancel, Heard, Stop, StopUp, pack, unpack

__all__ = ["StopChannel"]


class StopChannel(ipywidgets.Widget):
    """One comm per kernel for Stop, and Cancel of a load, alone. `on_stop(ids)` and `on_cancel(model)` are called on
    whatever thread the message came in on.

    ipykernel sends a message to the thread that last sent on its comm. So every answer goes out from inside the
    handler, and nothing else ever sends here: a front end that opens subshells is then heard at once.
    """

    def __init__(self, on_stop: Callable[[list[str]], None], on_cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self.on_msg(self._receive)

    def _receive(self, _widget: object, content: Any, _buffers: object) -> None:
        message = unpack(content, StopUp)
        if isinstance(message, Stop):
            self._on_stop(message.ids)
        if isinstance(message, Cancel):
            self._on_cancel(message.model)
        if message is not None:
            self.send(pack(Heard()))
