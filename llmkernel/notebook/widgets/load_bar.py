"""LoadBar: the widget of a load; extension/src/load is its browser half."""

import traitlets

from llmkernel.notebook.widgets.live_widget import LiveWidget, bundle
from llmkernel.notebook.widgets.messages import LoadState, pack
from llmkernel.notebook.widgets.stop_channel import StopChannel

__all__ = ["LoadBar"]


class LoadBar(LiveWidget):
    """A bar with the stages of a load, and Cancel, which goes over the StopChannel. It holds the newest state, so that
    a view that mounts late shows that."""

    _esm = bundle("load.js")
    _css = bundle("load.css")
    load = traitlets.Dict().tag(sync=True)

    def __init__(self, stop: StopChannel, state: LoadState) -> None:
        super().__init__(stop, load=pack(state))

    def show(self, state: LoadState) -> None:
        """Sent if it is another than before."""
        self.load = pack(state)
