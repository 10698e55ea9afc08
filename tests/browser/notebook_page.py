"""NotebookPage: a notebook open in a browser, JupyterLab's or Notebook 7's."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Locator, Page, expect

from tests.browser.jupyter_lab import JupyterServer

__all__ = ["FRONT_ENDS", "NotebookPage", "OpenNotebook", "write_notebook"]

FRONT_ENDS = {"lab": "lab/workspaces/{workspace}/tree/{name}", "notebook": "notebooks/{name}"}

_PANEL = """
const app = window.jupyterapp;
const panel = app.shell.currentWidget;
"""


def write_notebook(server: JupyterServer, name: str, *cells: str) -> Path:
    """A new notebook `name` with these code cells."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    path = server.folder / name
    nbformat.write(notebook, path)
    return path


class NotebookPage:
    """Drives the notebook `name`. Cells are run by the front end's own command; the rest is clicked as people do."""

    def __init__(self, page: Page, server: JupyterServer, name: str, front_end: str = "lab") -> None:
        self.page = page
        self.server = server
        self.name = name
        self.front_end = front_end
        self.console: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"pageerror: {error.stack or error}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self) -> "NotebookPage":
        """Go there and wait until the kernel is idle."""
        path = FRONT_ENDS[self.front_end].format(workspace=f"w{time.monotonic_ns()}", name=self.name)
        self._go(lambda: self.page.goto(f"{self.server.url}/{path}"))
        return self

    def reload(self) -> None:
        self._go(self.page.reload)

    def _go(self, navigate: Callable[[], object]) -> None:
        """Whatever a front end says of itself while it starts is not ours."""
        before = list(self.console)
        navigate()
        self.wait_until_ready()
        self.console[:] = before

    def wait_until_ready(self) -> None:
        """The cells are there and the kernel is idle or busy: connected."""
        self.page.wait_for_function(
            "() => { const panel = window.jupyterapp?.shell.currentWidget;"
            " const kernel = panel?.sessionContext?.session?.kernel;"
            " return kernel?.connectionStatus === 'connected' && ['idle', 'busy'].includes(kernel.status)"
            " && panel.content.widgets.length > 0; }",
            timeout=60_000,
        )

    def start(self, index: int) -> None:
        """Run cell `index`; it may go on."""
        self.page.evaluate(
            f"(index) => {{ {_PANEL} panel.content.activeCellIndex = index; panel.content.mode = 'command';"
            " panel.content.deselectAll(); void app.commands.execute('notebook:run-cell'); }",
            index,
        )

    def run(self, index: int, *, timeout: float = 60) -> None:
        """Run cell `index` to its end."""
        self.start(index)
        self.wait_until_run(index, timeout=timeout)

    def wait_until_run(self, index: int, *, timeout: float = 60) -> None:
        self.page.wait_for_function(
            f"(index) => {{ {_PANEL} const cell = panel.content.widgets[index];"
            " return cell.model.executionState === 'idle' && cell.model.executionCount !== null; }",
            arg=index,
            timeout=timeout * 1000,
        )

    def execute(self, code: str, *, timeout: float = 30) -> str:
        """Run code in the kernel without a cell, while nothing else runs there; what it printed."""
        return str(
            self.page.evaluate(
                f"async ([code, timeout]) => {{ {_PANEL} let text = '';"
                " const future = panel.sessionContext.session.kernel.requestExecute("
                "   {code, store_history: false, silent: false});"
                " future.onIOPub = (m) => { if (m.header.msg_type === 'stream') text += m.content.text;"
                "   if (m.header.msg_type === 'error') text += m.content.traceback.join('\\n'); };"
                " await Promise.race([future.done, new Promise((_, no) => setTimeout(() => no('late'), timeout))]);"
                " return text; }",
                [code, timeout * 1000],
            )
        )

    def cell(self, index: int) -> Locator:
        """The cell on screen."""
        return self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{index}']")

    def output(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputArea")

    def view(self, index: int) -> Locator:
        """Our live view in a cell's output."""
        return self.output(index).locator(".llmk")

    def stored_outputs(self, index: int) -> list[dict[str, Any]]:
        """The outputs of a cell as the open document holds them."""
        outputs: list[dict[str, Any]] = self.page.evaluate(
            f"(index) => {{ {_PANEL} return panel.content.widgets[index].model.outputs.toJSON(); }}", index
        )
        return outputs

    def save(self) -> Any:
        """Save, and read the file."""
        self.page.evaluate(f"async () => {{ {_PANEL} await panel.context.save(); }}")
        return nbformat.read(self.server.folder / self.name, as_version=4)

    def restart_kernel(self) -> None:
        self.page.evaluate(f"async () => {{ {_PANEL} await panel.sessionContext.session.kernel.restart(); }}")
        self.wait_until_ready()

    def theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        light = json.dumps("Light" in name).lower()
        if self.page.evaluate("() => document.body.dataset.jpThemeLight") == light:
            return
        self.page.evaluate(
            f"async (theme) => {{ {_PANEL} await app.commands.execute('apputils:change-theme', {{theme}}); }}", name
        )
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{light}'")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def wait_for(self, condition: Callable[[], bool], what: str, *, timeout: float = 15) -> None:
        """Until `condition()` holds, asked at every turn of the page."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, what
            self.page.wait_for_timeout(20)

    @property
    def errors(self) -> list[str]:
        """What the page itself complained of."""
        ours = ("pageerror", "rate exceeded", "Refused", "Content Security")
        return [line for line in self.console if any(word in line for word in ours)]

    def expect_text(self, index: int, text: str, *, timeout: float = 15) -> None:
        expect(self.output(index)).to_contain_text(text, timeout=timeout * 1000)


OpenNotebook = Callable[..., NotebookPage]
"""See the fixture `open_notebook`."""
