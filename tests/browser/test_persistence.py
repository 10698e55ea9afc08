"""Nothing on screen is lost: by a reload, by another kernel, by nbconvert; and nothing of a widget is stored."""

import nbformat
import pytest
from nbconvert import HTMLExporter, MarkdownExporter
from playwright.sync_api import expect

from tests.browser.notebook_page import FRONT_ENDS, OpenNotebook
from tests.browser.test_stream_view import answer, opened


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_reload_reopen_convert(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = opened(
        open_notebook,
        front_end,
        "%%generate --max-tokens 30\nfirst",
        "%%generate --background --max-tokens 300\nhello",
        "%llm show",
    )
    notebook.run(1)
    notebook.start(2)
    expect(notebook.view(2).locator(".llmk-plain")).not_to_be_empty()
    notebook.save()

    notebook.reload()  # in mid-stream, the kernel lives
    expect(notebook.output(1)).to_contain_text(answer("first", 30))
    text = notebook.view(2).locator(".llmk-plain")
    expect(text).not_to_be_empty()
    assert answer("hello", 300).startswith(text.inner_text())
    expect(notebook.view(2).locator(".llmk-state")).to_have_text("done", timeout=20_000)
    assert text.text_content() == answer("hello", 300)
    notebook.run(3)
    expect(notebook.output(3)).to_contain_text(answer("hello", 300)[:40])
    notebook.save()
    notebook.reload()  # after the end: from the snapshot
    expect(notebook.view(2).locator(".llmk-plain")).to_have_text(answer("hello", 300))

    stored = notebook.save()
    nbformat.validate(stored)
    assert "widgets" not in stored.metadata
    for exporter in (HTMLExporter(), MarkdownExporter()):
        exported, _ = exporter.from_notebook_node(stored)
        assert answer("first", 30) in exported and answer("hello", 300)[:60] in exported

    notebook.page.close()
    notebook.server.end_kernels()
    again = open_notebook(front_end=front_end, name=notebook.name)  # another kernel
    expect(again.output(1)).to_contain_text(answer("first", 30))
    expect(again.output(3)).to_contain_text(answer("hello", 300)[:40])
