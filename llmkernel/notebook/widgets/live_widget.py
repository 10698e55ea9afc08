"""LiveWidget: what the widgets of a cell share: a built bundle, the way for Stop, an end that leaves nothing."""

import os
import pathlib
from typing import Any

import anywidget
import traitlets

from llmkernel.notebook.widgets.stop_channel import StopChannel

__all__ = ["LiveWidget", "bundle"]

_STATIC = pathlib.Path(__file__).parent.parent / "static"
_FOLLOW_FILES = bool(os.environ.get("ANYWIDGET_HMR"))


def bundle(name: str) -> str | pathlib.Path:
    """Text of a built file. As a path anywidget would follow its changes, and keep every view for ever to tell it."""
    return _STATIC / name if _FOLLOW_FILES else (_STATIC / name).read_text("utf-8")


class LiveWidget(anywidget.AnyWidget):
    """stop: a reference to the kernel's one StopChannel."""

    stop = traitlets.Unicode().tag(sync=True)

    def __init__(self, stop: StopChannel, **state: Any) -> None:
        super().__init__(stop=f"IPY_MODEL_{stop.model_id}", **state)

    @property
    def view_data(self) -> dict[str, Any]:
        """What of an output's data shows it; never to be stored: without this kernel it is an error on the page."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view}

    def close(self) -> None:
        """Let go of the browser's half, and of the layout model that comes with every widget."""
        layout = self.layout
        super().close()
        layout.close()
