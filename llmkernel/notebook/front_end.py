"""What the front end of the running cell can show."""

import pathlib
from typing import Any

__all__ = ["shows_widgets"]

_BUNDLES = tuple(pathlib.Path(__file__).parent / "static" / name for name in ("stream.js", "dashboard.js", "load.js"))
"""The browser's half of the widgets; missing where an editable install could not build it."""


def shows_widgets(shell: Any) -> bool:
    """Whether the cell that runs now was sent by a notebook page, where live views work.

    JupyterLab, Notebook 7 and those that speak to kernels through their libraries name the cell in the request;
    nbclient, papermill and consoles do not. Those would draw nothing, and nbclient would store every widget's state.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not all(bundle.exists() for bundle in _BUNDLES):
        return False
    metadata = (kernel.get_parent("shell") or {}).get("metadata") or {}
    return bool(metadata.get("cellId"))
