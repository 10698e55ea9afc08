"""The dashboard on a page: figures, requests with their reasons, Stop and the way of a request; pictures to look at."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.notebook_page import NotebookPage, OpenNotebook


def dashboard(notebook: NotebookPage, cell: int) -> Locator:
    return notebook.output(cell).locator(".llmk-dashboard")


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_a_dashboard_shows_what_runs_and_why_something_waits(
    open_notebook: OpenNotebook, screenshot: Callable[[NotebookPage, str], Path], theme: str
) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:step_ms=100,num_blocks=40,max_model_len=512 --name fake --max-num-batched-tokens 64",
        "%llm dashboard",
        "prompts = [f'Question {n}: what is a message queue?' for n in range(12)]\n"
        "many = %generate --background --prompts prompts --max-tokens 400 --quiet",
        "%generate --raw --max-tokens 12 " + "What is a message queue? " * 8,
    )
    notebook.theme(f"JupyterLab {theme}")
    for cell in range(4):
        notebook.run(cell)
    shown = dashboard(notebook, 2)
    shown.evaluate("element => element.scrollIntoView({block: 'start'})")
    rows = shown.locator(".llmk-space .llmk-tr:visible")
    expect(rows).to_have_count(12)
    expect(shown.locator('[data-state="decoding"]').first).to_be_visible()
    next_in_queue = notebook.page.locator(".llmk-state", has_text=re.compile(r"^queued #1$"))
    expect(rows.filter(has=next_in_queue)).to_contain_text("waiting for KV: needs ")
    expect(rows.first).to_contain_text("[4]")
    expect(shown.locator(".llmk-chart")).to_have_count(6)
    expect(shown.locator(".llmk-figure").first).to_contain_text("running")
    screenshot(notebook, f"dashboard-{theme.lower()}")

    running = shown.locator('.llmk-tr[data-state="decoding"]')
    stopped_id = running.last.get_attribute("data-id")
    running.last.get_by_role("button", name="Stop this request").click()
    expect(shown.locator(f'.llmk-tr[data-id="{stopped_id}"]')).to_contain_text("stopped")

    running.first.get_by_role("button", name="Show the way of this request").click()
    expect(shown.locator(".llmk-timeline")).to_contain_text("first token")
    notebook.execute("many.cancel()")
    notebook.start(4)
    notebook.view(4).scroll_into_view_if_needed()
    notebook.wait_until_run(4)
    shown.evaluate("element => element.scrollIntoView({block: 'start'})")
    answered = rows.first
    expect(answered).to_contain_text("done")
    answered.locator(".llmk-why").click()
    expect(answered).to_have_attribute("aria-selected", "true")
    for hop in ("ADD sent", "prefill", "pushed", "detokenized", "on screen", "finished"):
        expect(shown.locator(".llmk-hop-name").filter(has_text=hop).first).to_be_visible()
    shown.locator(".llmk-trace").evaluate("element => element.scrollIntoView({block: 'center'})")
    screenshot(notebook, f"trace-{theme.lower()}")
    assert "on screen" in notebook.execute("%llm trace")
    assert notebook.errors == []


def test_a_view_tells_how_much_of_a_long_prompt_was_read(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:step_ms=150,num_blocks=400,max_model_len=4096 --name fake --max-num-batched-tokens 64",
        "%generate --raw --max-tokens 4 " + "x" * 1800,
    )
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    expect(notebook.view(2)).to_contain_text(re.compile(r"reading.*prefill [1-9][\d,]* / 1,800 tokens"))
    notebook.wait_until_run(2)


def test_a_thousand_rows_cost_what_a_page_of_them_does(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:step_ms=0,num_blocks=4096 --name fake",
        "%llm dashboard",
        "items = [f'number {n}' for n in range(1000)]\n%generate --quiet --prompts items --max-tokens 4",
    )
    for cell in range(4):
        notebook.run(cell)
    shown = dashboard(notebook, 2)
    expect(shown.locator(".llmk-space")).to_have_attribute("style", "height: 24000px;")
    assert shown.locator(".llmk-space .llmk-tr").count() < 60
    shown.locator(".llmk-table").evaluate("element => { element.scrollTop = 12000 }")
    expect(shown.locator(".llmk-space .llmk-tr:visible").first).to_contain_text("done")
