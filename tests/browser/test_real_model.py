"""The default model on a page: many streams of which nothing is lost, and the tokens of an answer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import FRONT_ENDS, NotebookPage, OpenNotebook

STREAMS = 16
LOAD = (
    "%load_ext llmkernel\nfrom llmkernel import Session\n%llm load smollm2\nllm = Session.current.models['smollm2'].llm"
)
PROMPTS = (
    "words = 'queue river bread music winter paper moon garden clock train coffee city bird stone light game'.split()\n"
    "prompts = [f'Write three lines about {word}, with an emoji in each: 🙂' for word in words]\n"
)
PAUSE = "await llm.engine_core.call_utility_async('pause_scheduler', 'keep', False)"
RESUME = "await llm.engine_core.call_utility_async('resume_scheduler')"


def texts(notebook: NotebookPage) -> list[str]:
    return list(json.loads(notebook.execute("import json; print(json.dumps(many.texts))")))


def expect_all(notebook: NotebookPage, cell: int, wanted: list[str]) -> None:
    """Each row, scrolled to, shows its text, to the letter."""
    rows = notebook.view(cell).locator(".llmk-row")
    expect(rows).to_have_count(len(wanted))
    for number, text in enumerate(wanted):
        rows.nth(number).scroll_into_view_if_needed()
        shown = rows.nth(number).locator(".llmk-plain")
        notebook.wait_for(lambda shown=shown, text=text: shown.text_content() == text, f"row {number} shows all")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_sixteen_streams_lose_nothing(open_notebook: OpenNotebook, front_end: str) -> None:
    cells = (
        LOAD,
        PROMPTS + "%generate -b --prompts prompts --max-tokens 300 --ignore-eos --seed 7 -o many",
        "%llm show --view",
    )
    notebook = open_notebook(*cells, front_end=front_end)
    notebook.run(0, timeout=240)
    notebook.run(1)
    notebook.wait_for(lambda: min(map(len, texts(notebook))) > 40, "every stream has begun", timeout=60)
    notebook.execute(PAUSE)
    held = texts(notebook)
    assert all(held) and notebook.execute("print(many.done)").strip() == "False"
    expect_all(notebook, 1, held)
    notebook.execute(RESUME)
    notebook.output(1).locator(".llmk").wait_for(state="detached", timeout=120_000)
    whole = texts(notebook)
    assert all(text.startswith(start) for text, start in zip(whole, held, strict=True)) and whole != held
    stored = notebook.stored_outputs(1)[0]["data"]["text/plain"]
    assert all(text.strip() in stored for text in whole)
    notebook.run(2)
    expect_all(notebook, 2, whole)
    assert not notebook.errors


@pytest.mark.timeout(300)
def test_tokens_by_pointer_and_by_keys(
    open_notebook: OpenNotebook, screenshot: Callable[[NotebookPage, str], Path]
) -> None:
    notebook = open_notebook(
        LOAD,
        "%%generate --logprobs 5 --max-tokens 60 --seed 3 -o told\nWrite one line about rivers, then three emoji: 🦊",
        "told.show(view=True)",
    )
    for cell in range(3):
        notebook.run(cell, timeout=240)
    view = notebook.output(2).locator(".llmk-stream")
    view.get_by_role("button", name="Show as Tokens").click()
    tokens = view.locator(".llmk-token")
    assert tokens.count() == int(notebook.execute("print(len(told.tokens()))"))
    panel = view.locator(".llmk-panel")
    tokens.nth(3).hover()
    expect(panel.locator("tr")).to_have_count(5)
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        tokens.nth(4).hover()
        tokens.nth(3).hover()
        expect(panel).to_be_visible()
        screenshot(notebook, f"tokens-{theme.lower()}")
    notebook.page.mouse.move(5, 5)
    expect(panel).to_be_hidden()
    tokens.first.focus()
    expect(panel).to_be_visible()
    for _ in range(2):
        notebook.page.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(panel).to_be_visible()
    notebook.page.keyboard.press("ArrowDown")
    expect(tokens.nth(3)).to_be_focused()
    assert not notebook.errors
