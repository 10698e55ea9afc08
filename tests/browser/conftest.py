"""A Jupyter server for the whole run, a Chromium for each module, and pages on notebooks of their own.

Left out where playwright, JupyterLab or Chromium are missing; `make test-browser` installs and runs them.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'llmkernel[browser]'")
pytest.importorskip("jupyterlab", reason="pip install 'llmkernel[browser]'")

from tests.browser.jupyter_lab import JupyterServer  # noqa: E402
from tests.browser.notebook_page import NotebookPage, OpenNotebook, write_notebook  # noqa: E402

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SIZE = {"width": 1200, "height": 900}
SCREENSHOTS = Path(os.environ.get("LLMKERNEL_SCREENSHOTS", "build/screenshots"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    running = JupyterServer.start(tmp_path_factory.mktemp("jupyter"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> "Iterator[playwright.Browser]":
    """Per module: while Playwright runs, no other test may use an event loop in this thread."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"There is no Chromium at {CHROMIUM}; apt-get install chromium.")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_notebook(server: JupyterServer, browser: "playwright.Browser") -> Iterator[OpenNotebook]:
    """`open_notebook(*cells, front_end="lab")`: a new notebook, open in a page of a fresh profile."""
    contexts = []
    count = 0

    def open_(*cells: str, front_end: str = "lab", name: str | None = None) -> NotebookPage:
        nonlocal count
        count += 1
        context = browser.new_context(viewport=SIZE, permissions=["clipboard-read", "clipboard-write"])
        contexts.append(context)
        if name is None:
            name = f"notebook-{os.getpid()}-{len(list(server.folder.iterdir()))}.ipynb"
            write_notebook(server, name, *cells)
        return NotebookPage(context.new_page(), server, name, front_end).open()

    yield open_
    for context in contexts:
        context.close()
    server.end_kernels()


@pytest.fixture
def screenshot() -> Callable[[NotebookPage, str], Path]:
    """`screenshot(notebook, name)`: write build/screenshots/NAME.png (LLMKERNEL_SCREENSHOTS is another folder)."""

    def take(notebook: NotebookPage, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        notebook.page.screenshot(path=path)
        return path

    return take
