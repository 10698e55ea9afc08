"""Pictures of the live views, light and dark, in build/screenshots (LLMKERNEL_SCREENSHOTS), for people to look at."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage, OpenNotebook

THEMES = ("Light", "Dark")
CELLS = {
    "one": "%%generate --max-tokens 600\nTell me about message queues.",
    "four": "%%generate --max-tokens 600 -n 4\nTell me about message queues.",
    "fifty": "prompts = [f'Question {n}: a queue?' for n in range(50)]\n%generate --prompts prompts --max-tokens 600",
    "markdown": "%%generate --model echo --raw --max-tokens 800\n"
    "## A title\n\nSome *text* with `code`, $e^{i\\pi} = -1$ and a list:\n\n- one\n- two\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hello')\n```\n\n$$\\int_0^1 x\\,dx = \\frac12$$\n"
    + "."
    * 400,
}


def test_pictures(open_notebook: OpenNotebook, screenshot: Callable[[NotebookPage, str], Path]) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:step_ms=50,num_blocks=4096,max_model_len=4096 --name fake",
        "%llm load fake:echo=1,step_ms=12 --name echo\n%llm config model=fake",
        *CELLS.values(),
    )
    for cell in range(3):
        notebook.run(cell)
    for cell, name in enumerate(CELLS, 3):
        notebook.start(cell)
        view = notebook.view(cell)
        expect(view.locator(".llmk-state").first).to_have_text("writing")
        if name == "markdown":
            view.get_by_role("button", name="Show as Markdown").click()
            expect(view.locator("math[display=block]")).to_be_visible()
        for theme in THEMES:
            notebook.theme(f"JupyterLab {theme}")
            view.evaluate("element => element.scrollIntoView({block: 'center'})")
            notebook.page.wait_for_timeout(600)  # let there be something to see
            taken = screenshot(notebook, f"{name}-{theme.lower()}")
            assert taken.stat().st_size > 10_000
        notebook.page.locator(".llmk-button[aria-label^='Stop']:visible").first.click()
        notebook.wait_until_run(cell)
    for theme in THEMES:
        notebook.theme(f"JupyterLab {theme}")
        screenshot(notebook, f"done-{theme.lower()}")
    assert not notebook.errors
