"""What streams on a page cost, as JSON: a real JupyterLab in Chromium, a fake model, 20 tokens a second per stream.

messages and bytes per second that reach the page, the kernel's CPU (1 = a core), how far the screen is behind the
kernel, frames per second of the page, lag of the kernel's loop. With --dashboard one is open above the streams. Needs
`pip install -e '.[browser]'` and Chromium.

    python -m benchmarks.streams [--streams 1 10 50 200] [--tokens 200] [--dashboard]
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS, SIZE
from tests.browser.jupyter_lab import JupyterServer
from tests.browser.measure import SAMPLE, Wire, figures, load_cells, stream_cell, why_too_busy
from tests.browser.notebook_page import NotebookPage, write_notebook

ROOM = {"width": 1200, "height": 1800}
"""Pixels of a page that shows a dashboard and streams at once."""


def measure(
    server: JupyterServer, browser: Browser, streams: int, tokens: int, *, dashboard: bool = False
) -> dict[str, Any]:
    """One notebook with so many streams at once."""
    name = f"streams-{streams}.ipynb"
    before = (*load_cells(streams), *(["%llm dashboard"] if dashboard else []))
    write_notebook(server, name, *before, stream_cell(streams, tokens))
    context = browser.new_context(viewport=ROOM if dashboard else SIZE)
    notebook = NotebookPage(context.new_page(), server, name)
    wire = Wire(notebook)
    notebook.open()
    for cell in range(len(before)):
        notebook.run(cell)
    busy = why_too_busy(notebook)
    notebook.page.evaluate(SAMPLE)
    notebook.start(len(before))
    notebook.view(len(before)).wait_for()
    notebook.view(len(before)).wait_for(state="detached", timeout=tokens * 1000)
    measured = figures(notebook, wire)
    context.close()
    server.end_kernels()
    return {"streams": streams, "dashboard": dashboard, **measured} | ({"doubtful": busy} if busy else {})


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dashboard", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = JupyterServer.start(Path(folder))
        try:
            with sync_playwright() as running:
                browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                results = [
                    measure(server, browser, streams, options.tokens, dashboard=options.dashboard)
                    for streams in options.streams
                ]
                browser.close()
        finally:
            server.stop()
    print(json.dumps({"machine": platform.machine(), "cores": os.cpu_count(), "streams": results}, indent=1))


if __name__ == "__main__":
    main()
