"""Model text is data: in the live view, in the stored output, in what nbconvert makes of it, nothing runs."""

from pathlib import Path

import pytest
from nbconvert import HTMLExporter, SlidesExporter
from playwright.sync_api import expect

from tests.browser.notebook_page import FRONT_ENDS, NotebookPage, OpenNotebook

BAIT = "http://bait.invalid/"
HOSTILE = f"""\
<script>window.hacked = 1; fetch("{BAIT}script")</script>
<img src=x onerror="window.hacked = 1"><img src="{BAIT}html.png">

![a picture]({BAIT}markdown.png) [a link](javascript:window.hacked=1) <svg onload="window.hacked=1"></svg>

Costs $x$ or $y$. \x1b[31mred\x1b[0m \x1b]0;title\x07 עברית العربية \u202eabc\u202c
"""


def hacked(notebook: NotebookPage) -> bool:
    return bool(notebook.page.evaluate("() => window.hacked === 1"))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_hostile_text_is_text(open_notebook: OpenNotebook, tmp_path: Path, front_end: str) -> None:
    notebook = open_notebook(
        "%load_ext llmkernel",
        "%llm load fake:echo=1,step_ms=10,num_blocks=4096,max_model_len=8192 --name fake\n%llm config raw=on",
        f"hostile = [{HOSTILE!r}]\n%generate --prompts hostile --max-tokens 4000",
        front_end=front_end,
    )
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    plain = notebook.view(2).locator(".llmk-plain")
    expect(plain).to_contain_text("onload=")
    assert "<script>window.hacked = 1" in (plain.text_content() or "")
    assert plain.locator("*").count() == 0  # no element at all: formulas are for the Markdown view
    notebook.view(2).get_by_role("button", name="Show as Markdown").click()
    markdown = notebook.view(2).locator(".llmk-markdown")
    expect(markdown).to_contain_text("<script>window.hacked")
    assert markdown.locator("script, img, svg, iframe").count() == 0
    expect(markdown.locator("math")).to_have_count(2)
    assert [link.get_attribute("href") for link in markdown.locator("a").all()] == [f"{BAIT}markdown.png"]
    notebook.wait_until_run(2)
    notebook.page.wait_for_timeout(300)
    assert not hacked(notebook)

    stored = notebook.save()
    for exporter, name in ((HTMLExporter(), "page.html"), (SlidesExporter(), "slides.html")):
        exported, _ = exporter.from_notebook_node(stored)
        (tmp_path / name).write_text(exported)
        page = notebook.page.context.new_page()
        fetched: list[str] = []
        page.on("request", lambda request, fetched=fetched: fetched.append(request.url))
        page.goto((tmp_path / name).as_uri(), wait_until="domcontentloaded")
        page.wait_for_timeout(300)
        assert "hacked = 1" in page.locator("body").inner_text()
        assert not page.evaluate("() => window.hacked === 1")
        assert not [url for url in fetched if url.startswith(BAIT)]
        page.close()
    assert not [url for url in notebook.requests if url.startswith(BAIT)]
    assert not notebook.errors


LONG_TEXTS = """
from IPython.display import display
from llmkernel.notebook.widgets.stop_channel import StopChannel
from llmkernel.notebook.widgets.stream_view import StreamView
view = StreamView([("a", "emoji"), ("b", "line")], StopChannel(print, print))
display(view)
view.append(0, "🙂" * 10_000)
view.append(1, "w" * 200_000)
view.beat(counters=True)
"""


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_very_long_text_is_shown_whole(open_notebook: OpenNotebook, front_end: str) -> None:
    notebook = open_notebook(LONG_TEXTS, front_end=front_end)
    notebook.run(0)
    texts = notebook.view(0).locator(".llmk-plain")
    expect(texts.nth(1)).to_contain_text("w")
    notebook.view(0).get_by_role("button", name="Show as Markdown").click()
    markdown = notebook.view(0).locator(".llmk-markdown")
    expect(markdown.nth(1)).to_contain_text("w")
    for shown in (markdown, texts):
        assert [len(text.strip().encode("utf-16-le")) // 2 for text in shown.all_text_contents()] == [20_000, 200_000]
        notebook.view(0).get_by_role("button", name="Show as Text").click()
    assert not notebook.errors
