"""The first cell of all, in a real JupyterLab and a real Notebook 7, and how soon its text is seen."""

import statistics

import pytest
from playwright.sync_api import expect

from llmkernel.engine.fake_executor import fake_answer
from tests.browser.notebook_page import FRONT_ENDS, OpenNotebook

LOAD = "%load_ext llmkernel\n%llm load fake:step_ms=50 --name fake\n%llm config raw=on"

LIMIT = 0.2
"""Seconds from a request's first token in the engine to its first text on the page."""
TIMES = 5
TOKENS = 15

FIRST_TEXT = """() => {
  window.firstText = 0;
  const look = () => {
    const text = document.querySelector('.llmk-plain');
    if (text && text.firstChild.length) window.firstText = (performance.timeOrigin + performance.now()) / 1000;
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
FIRST_TOKEN = "import time\nprint(asked.requests[0].metrics.first_token_ts + time.time() - time.monotonic())"
"""By the engine's clock, which on one machine counts as every process's monotonic clock does."""


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_answer_is_seen_as_soon_as_there_is_a_token(open_notebook: OpenNotebook, front_end: str) -> None:
    cells = [f"%%generate --max-tokens {TOKENS} -o asked\nhello"] * TIMES
    notebook = open_notebook(LOAD, *cells, front_end=front_end)
    notebook.run(0)
    lags = []
    for cell in range(1, TIMES + 1):
        notebook.page.evaluate(FIRST_TEXT)
        notebook.run(cell)
        lags.append(float(notebook.page.evaluate("() => window.firstText")) - float(notebook.execute(FIRST_TOKEN)))
    print(f"{front_end}: first text after {[round(lag * 1000) for lag in lags]} ms")
    assert statistics.median(lags) < LIMIT, lags
    answer = bytes(fake_answer(list(b"hello"), TOKENS)).decode()
    expect(notebook.output(1)).to_contain_text(answer.strip())
    (stored,) = notebook.stored_outputs(1)[:1]
    assert stored["data"] == {"text/markdown": answer, "text/plain": answer}
    assert not notebook.errors
