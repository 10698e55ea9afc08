"""A load on a page: a bar with its stages, Cancel, which works while a cell blocks the kernel too, and what stays."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import FRONT_ENDS, NotebookPage, OpenNotebook

LIMIT = 1.0
"""Seconds from Interrupt of a load to the end of its process (design section 6); Cancel is to be as good."""
ROUND_TRIPS = 0.3
"""What the test itself takes to click and to look."""

START = (
    "%load_ext llmkernel\nimport time\nfrom llmkernel import Session\n"
    "def slow():\n    %llm load fake:load_ms=60000 --name slow"
)


def kernel_pid(notebook: NotebookPage) -> int:
    return int(notebook.execute("import os; print(os.getpid())"))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_cancel_ends_a_load(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = open_notebook(
        START, "%llm load fake:load_ms=60000 --name slow", "slow()", "time.sleep(5)", front_end=front_end
    )
    notebook.run(0)
    kernel = psutil.Process(kernel_pid(notebook))
    for cell, blocked in ((1, False), (2, True)):
        notebook.start(cell)
        bar = notebook.view(cell)
        expect(bar.locator('[data-place="now"]')).to_contain_text("weights")
        (engine,) = [child for child in kernel.children() if "llmkernel.engine" in child.cmdline()]
        if blocked:
            notebook.start(3)
            notebook.page.wait_for_timeout(300)
        clicked = time.monotonic()
        bar.get_by_role("button", name="End this load").click()
        engine.wait(timeout=10)
        assert time.monotonic() - clicked < LIMIT + ROUND_TRIPS, "blocked" if blocked else "awaiting"
        notebook.expect_text(cell, "Loading slow: ended.")
        expect(notebook.view(cell)).to_have_count(0)
    notebook.wait_until_run(3)
    assert "The load of slow was ended" in notebook.output(1).inner_text()
    assert "widget" not in str(notebook.stored_outputs(1)) and not notebook.errors


def test_it_is_a_bar_while_it_loads_and_a_line_after(
    open_notebook: OpenNotebook, screenshot: Callable[[NotebookPage, str], Path]
) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel", "%llm load fake:load_ms=9000 --name fake", "%llm load fake: --name b"
    )
    notebook.run(0)
    notebook.start(1)
    bar = notebook.view(1)
    expect(bar.locator(".llmk-stage")).to_have_text(["process", "importing", "weights", "kv cache", "warm-up"])
    expect(bar.locator(".llmk-totals")).to_contain_text("weights 1/4")
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        screenshot(notebook, f"load-{theme.lower()}")
    notebook.save()
    notebook.reload()  # the line that replaces the bar reaches no page then: the bar itself says how it ended
    expect(bar.locator('[data-place="now"]')).to_contain_text("weights")
    expect(bar.locator(".llmk-totals")).to_contain_text("fake is ready (", timeout=15_000)
    expect(bar.locator(".llmk-stages")).to_be_hidden()
    notebook.run(2)
    expect(notebook.view(2)).to_have_count(0)
    notebook.expect_text(2, "b is ready (")
    assert not notebook.errors
