"""Run a notebook of notebooks/ in a kernel of its own, as a reader would."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

__all__ = ["NOTEBOOKS", "output_text", "run_notebook"]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run_notebook(name: str, *, timeout: int = 120, env: Mapping[str, str] | None = None) -> Any:
    """Execute notebooks/`name` (or a whole path) and return it with its outputs; the file is left as it is.

    A cell that raises, or takes more than `timeout` seconds, raises here. The kernel is this Python; it sees nothing of
    the user's IPython configuration, and `env` on top of this process's environment.
    """
    path = NOTEBOOKS / name
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable  # whatever a kernel spec of the user says
    with tempfile.TemporaryDirectory() as ipython:
        client.execute(env={**os.environ, "IPYTHONDIR": ipython, **(env or {})})
    return notebook


def output_text(notebook: Any, cell_id: str) -> str:
    """What the cell `cell_id` printed, and its results as text."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "".join(parts)
