"""The first cell of all, in a real JupyterLab and a real Notebook 7."""

import pytest
from playwright.sync_api import expect

from llmkernel.engine.fake_executor import fake_answer
from tests.browser.notebook_page import FRONT_ENDS, OpenNotebook

LOAD = "%load_ext llmkernel\n%llm load fake:step_ms=20 --name fake\n%llm config raw=on"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_answer_is_seen_in_its_cell(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = open_notebook(LOAD, "%%generate --max-tokens 40\nhello", front_end=front_end)
    notebook.run(0)
    notebook.run(1)
    answer = bytes(fake_answer(list(b"hello"), 40)).decode()
    expect(notebook.output(1)).to_contain_text(answer.split()[0])
    (stored,) = notebook.stored_outputs(1)[:1]
    assert stored["data"] == {"text/markdown": answer, "text/plain": answer}
    assert not notebook.errors
