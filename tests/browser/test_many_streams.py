"""200 streams at 20 tokens a second, and 50 beside a dashboard: nothing is lost, few messages.

Lags and frames: see benchmarks/streams.py.
"""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.measure import SAMPLE, Wire, figures, load_cells, stream_cell
from tests.browser.notebook_page import FRONT_ENDS, OpenNotebook
from tests.browser.test_stream_view import answer

STREAMS = 200
TOKENS = 200


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_two_hundred_streams(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = open_notebook(*load_cells(STREAMS), stream_cell(STREAMS, TOKENS), front_end=front_end)
    wire = Wire(notebook)
    notebook.reload()
    for cell in range(3):
        notebook.run(cell)
    notebook.page.evaluate(SAMPLE)
    notebook.start(3)
    rows = notebook.view(3).locator(".llmk-row")
    expect(rows).to_have_count(STREAMS)
    notebook.page.wait_for_timeout(5000)
    notebook.page.evaluate("() => { window.sampling = false; }")  # the row that is watched leaves the screen
    last = rows.nth(STREAMS - 1)
    last.scroll_into_view_if_needed()
    caught_up = last.locator(".llmk-plain")
    expect(caught_up).not_to_be_empty(timeout=15_000)
    notebook.wait_for(lambda: len(caught_up.text_content() or "") > 10, "a row that comes into view catches up")
    part = caught_up.text_content() or ""
    assert answer(f"question {STREAMS - 1}", TOKENS).startswith(part)
    notebook.output(3).locator(".llmk").wait_for(state="detached", timeout=60_000)
    measured = figures(notebook, wire)
    print(json.dumps({"front_end": front_end, "streams": STREAMS, **measured}))
    stored = notebook.stored_outputs(3)[0]["data"]["text/plain"]
    for number in range(STREAMS):
        assert answer(f"question {number}", TOKENS) in stored, number
    assert not notebook.errors
    assert measured["messages_per_second"] <= 30


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_fifty_streams_beside_a_dashboard(open_notebook: OpenNotebook, front_end: str) -> None:
    streams, tokens = 50, 160
    cells = (*load_cells(streams), "%llm dashboard", stream_cell(streams, tokens))
    notebook = open_notebook(*cells, front_end=front_end)
    notebook.page.set_viewport_size({"width": 1200, "height": 1800})
    wire = Wire(notebook)
    notebook.reload()
    for cell in range(4):
        notebook.run(cell)
    notebook.page.evaluate(SAMPLE)
    notebook.start(4)
    dashboard = notebook.output(3).locator(".llmk-dashboard")
    expect(dashboard.locator(".llmk-figure").first).to_contain_text(f"running {streams}")
    expect(dashboard.locator('.llmk-tr[data-state="decoding"]').first).to_be_visible()
    expect(notebook.view(4).locator(".llmk-plain").first).not_to_be_empty()
    notebook.view(4).wait_for(state="detached", timeout=60_000)
    measured = figures(notebook, wire)
    print(json.dumps({"front_end": front_end, "dashboard": True, "streams": streams, **measured}))
    stored = notebook.stored_outputs(4)[0]["data"]["text/plain"]
    assert all(answer(f"question {number}", tokens) in stored for number in range(streams))
    assert not notebook.errors
    assert measured["messages_per_second"] <= 30
