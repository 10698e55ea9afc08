"""What the front end of the running cell can show."""

import pathlib
from typing import Any

__all__ = ["BUNDLE", "shows_widgets"]

BUNDLE = pathlib.Path(__file__).parent / "static" / "stream.js"
"""The browser's half of the live views; missing where an editable install could not build it."""


def shows_widgets(shell: Any) -> bool:
    """Whether the cell that runs now was sent by a notebook page, where live views work.

    JupyterLab, Notebook 7 and those that speak to kernels through their libraries name the cell in the request;
    nbclient, papermill and consoles do not. Those would draw nothing, and nbclient would store every widget's state.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not BUNDLE.exists():
        return False
    metadata = (kernel.get_parent("shell") or {}).get("metadata") or {}
    return bool(metadata.get("cellId"))
