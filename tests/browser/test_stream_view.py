"""The live view of a cell, in a real JupyterLab and a real Notebook 7: text that grows, Stop, Copy, readings."""

import re
import time

import pytest
from playwright.sync_api import expect

from llmkernel.engine.fake_executor import fake_answer
from tests.browser.notebook_page import FRONT_ENDS, NotebookPage, OpenNotebook

LOAD = "%load_ext llmkernel\n%llm load fake:step_ms={step},num_blocks=4096 --name fake\n%llm config raw=on"

LIMIT = 0.5
"""Seconds from the click to the end of the request (design section 6)."""
ROUND_TRIPS = 0.2
"""What the test itself takes to click and to look."""


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture(params=FRONT_ENDS)
def front_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(open_notebook: OpenNotebook, front_end: str, *cells: str, step: int = 20) -> NotebookPage:
    """A notebook with these cells after one that loads a fake model of one token in `step` ms."""
    notebook = open_notebook(LOAD.format(step=step), *cells, front_end=front_end)
    notebook.run(0)
    return notebook


def test_an_answer_grows_and_becomes_a_stored_bundle(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = opened(open_notebook, front_end, "%%generate --max-tokens 150\nhello")
    notebook.start(1)
    text = notebook.view(1).locator(".llmk-plain")
    expect(text).not_to_be_empty()
    seen = [text.inner_text()]
    while len(seen[-1]) < 120:
        notebook.page.wait_for_timeout(30)
        grown = text.inner_text()
        if grown != seen[-1]:
            seen.append(grown)
    assert len(seen) > 10
    assert all(answer("hello", 150).startswith(part) for part in seen)
    expect(notebook.view(1).locator(".llmk-state")).to_have_text("writing")
    expect(notebook.view(1).locator(".llmk-numbers")).to_have_text(
        re.compile(r"\d+ tokens · [\d.]+ tok/s · first after")
    )
    notebook.wait_until_run(1)
    expect(notebook.view(1)).to_have_count(0)
    stored, *remarks = notebook.stored_outputs(1)
    assert stored["data"] == {"text/markdown": answer("hello", 150), "text/plain": answer("hello", 150)}
    assert stored["metadata"]["llmkernel"]["usage"]["completion_tokens"] == 150
    assert [one["output_type"] for one in remarks] == ["stream"]
    assert not notebook.errors


STOP_CASES = {
    "awaiting": ("%%generate --max-tokens 2000\nhello", None),
    "background": ("%%generate --background --max-tokens 2000\nhello", None),
    "blocked": ("%%generate --background --max-tokens 2000\nhello", "import time; time.sleep(4)"),
}


def test_stop_ends_a_request_in_half_a_second(open_notebook: OpenNotebook, front_end: str) -> None:
    """In a cell that is awaited, in the background, and while another cell blocks the kernel's main thread."""
    cells = [source or "1" for case in STOP_CASES.values() for source in case]
    notebook = opened(open_notebook, front_end, *cells)
    notebook.execute(
        "import time\nfrom llmkernel import Session\nllm = Session.current.models['fake'].llm\n"
        "stopped = []\nstop = llm.stop_requests\n"
        "llm.stop_requests = lambda ids: (stopped.append(time.time()), stop(ids))"
    )
    for number, (case, (_, other)) in enumerate(STOP_CASES.items()):
        stop_in_time(notebook, 1 + 2 * number, blocked=other is not None, case=case)
    assert not notebook.errors


def stop_in_time(notebook: NotebookPage, cell: int, *, blocked: bool, case: str) -> None:
    notebook.start(cell)
    expect(notebook.view(cell).locator(".llmk-plain")).not_to_be_empty()
    steps = "print((await llm.collective_rpc('num_steps'))[0])"
    if blocked:
        before = int(notebook.execute(steps))
        notebook.start(cell + 1)
        notebook.page.wait_for_timeout(300)
    clicked = time.time()
    notebook.view(cell).get_by_role("button", name="Stop this request").click()
    notebook.output(cell).locator(".llmk").wait_for(state="detached", timeout=10_000)
    seconds = time.time() - clicked
    notebook.wait_until_run(cell)
    if blocked:
        notebook.wait_until_run(cell + 1)
        assert int(notebook.execute(steps)) - before < 100, "the engine went on for the 4 s of the block"
    else:
        assert seconds < LIMIT + ROUND_TRIPS, (case, seconds)
    heard = float(notebook.execute("print(stopped.pop())"))
    assert heard - clicked < LIMIT, (case, heard - clicked)
    stored = notebook.stored_outputs(cell)[0]
    assert stored["metadata"]["llmkernel"]["finish_reason"] == "abort"
    kept = stored["data"]["text/plain"]
    assert kept and answer("hello", 2000).startswith(kept)
