"""Pictures of the live views, light and dark, in build/screenshots (LLMKERNEL_SCREENSHOTS), for people to look at."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage, OpenNotebook

CELLS = {
    "one": "%%generate --max-tokens 400\nTell me about message queues.",
    "four": "%%generate --max-tokens 300 -n 4\nTell me about message queues.",
    "fifty": "prompts = [f'Question {n}: a queue?' for n in range(50)]\n%generate --prompts prompts --max-tokens 300",
    "markdown": "%%generate --model echo --raw --max-tokens 500\n"
    "## A title\n\nSome *text* with `code`, $e^{i\\pi} = -1$ and a list:\n\n- one\n- two\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hello')\n```\n\n$$\\int_0^1 x\\,dx = \\frac12$$\n" + "." * 80,
    "tokens": "%%generate --max-tokens 60 --logprobs 5\nTell me about message queues.",
}


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_pictures(open_notebook: OpenNotebook, screenshot: Callable[[NotebookPage, str], Path], theme: str) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:step_ms=50,num_blocks=4096,max_model_len=4096 --name fake",
        "%llm load fake:echo=1,step_ms=15 --name echo\n%llm config model=fake",
        *CELLS.values(),
    )
    notebook.theme(f"JupyterLab {theme}")
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)
    for cell, name in enumerate(CELLS, 3):
        notebook.start(cell)
        expect(notebook.view(cell).locator(".llmk-state").first).to_have_text("writing")
        notebook.page.wait_for_timeout(1500)  # let there be something to see
        notebook.view(cell).evaluate("element => element.scrollIntoView({block: 'center'})")
        if name == "tokens":
            notebook.view(cell).get_by_role("button", name="Show as Tokens").click()
            notebook.view(cell).locator(".llmk-token").nth(5).hover()
        if name == "markdown":
            notebook.view(cell).get_by_role("button", name="Show as Markdown").click()
            expect(notebook.view(cell).locator("table")).to_be_visible()
            notebook.page.wait_for_timeout(1500)
        taken = screenshot(notebook, f"{name}-{theme.lower()}")
        assert taken.stat().st_size > 10_000
        if name in ("one", "four", "fifty"):
            notebook.page.locator(".llmk-button[aria-label^='Stop']:visible").first.click()
        notebook.wait_until_run(cell)
    screenshot(notebook, f"done-{theme.lower()}")
