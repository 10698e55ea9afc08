"""Markdown from a model: nothing in it runs or fetches, in any parser, and code stays exact."""

import html
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.notebook.markdown_safety import safe_markdown
from llmkernel.notebook.plain_text import clean_text
from tests.notebook.rendered import dangers_in, renderings

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "text <b onmouseover=x>bold</b> <iframe src='http://e'></iframe>",
    "![alt](https://evil.example/pixel.png)",
    "![alt][r]\n\n[r]: https://evil.example/pixel.png",
    "!![](x)",
    "[a](javascript:alert(1)) [b]( JaVa&#115;cript:alert(1)) [c](<javascript:alert(1)>) [d](java\tscript:x)",
    "[a]\n\n[a]: javascript:alert(1)",
    "[a](data:text/html;base64,PHNjcmlwdD4=) <javascript:alert(1)>",
    "<!-- comment --> <?php x ?> <!DOCTYPE html> <![CDATA[x]]>",
    "`open <script>x</script>",
    "a\n\n    <script>indented</script>\n",
    "- item\n  ```\n  <script>x</script>\n",
    "> ```\n> <script>x</script>\nno more quote <img src=x>",
    "$`$ <b>` and `<script>`",
    "$$\n```\n$$ <script>x</script>\n```",
    "\\begin{x}\n```\n\\end{x} <img src=y>\n```",
    "http://x`[<b>`",
    "| a | `x | <img src=x>` |\n|---|---|\n| b | c |",
    "\\<script> \\\\<script>",
    "$\\href{javascript:alert(1)}{x}$ $\\href {data:x}{y}$",
    "`` ` <script> ` ``` <img src=x>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_markdown_is_inert(text: str) -> None:
    safe = safe_markdown(text)
    for parser, rendered in renderings(safe).items():
        assert not dangers_in(rendered), (parser, safe, rendered)
    assert "\\href{javascript" not in safe and "\\href {" not in safe


FRAGMENTS = [
    *(
        "`",
        "``",
        "```",
        "````",
        "~~~",
        "\n",
        "\n\n",
        "    ",
        "  ",
        "- ",
        "1. ",
        "> ",
        "\t",
        "|",
        "|---|\n",
        "word",
        "# ",
    ),
    *("<script>x()</script>", "<img src=x onerror=y()>", "<b>", "</b>", "<div", "<!--", "-->", "&lt;", '"', "'", ":"),
    *("![a](http://e/x.png)", "![a][r]", "[r]: http://e/x.png", "[r]: javascript:x()", "[a](javascript:x())", "[a][r]"),
    *("$", "$$", "\\", "\\`", "[", "]", "(", ")", "!", "<javascript:x()>", "<http://e>", "http://x", "\\begin{x}"),
    *("\\end{x}", "\\(", "\\)", "\\href{javascript:x()}{y}", "===", "*", "_", "data:text/html,x", "[^1]: ", "{", "}"),
]


@settings(max_examples=250, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=2, max_size=22).map("".join))
def test_no_combination_of_marks_comes_alive(text: str) -> None:
    safe = safe_markdown(text)
    for parser, rendered in renderings(safe).items():
        assert not dangers_in(rendered), (parser, safe, rendered)


CODE = [
    "```python\nprint('<b>', a[0](x), '![x](http://e)')\n```",
    "Use `vector<int>` and `<b>`.",
    "1. first:\n   ```cpp\n   #include <stdio.h>\n   ```\n2. second",
    "~~~\n<b>\n~~~",
    "````\n```\n<b>\n```\n````",
    "    indented <code>",
]


@pytest.mark.parametrize("text", CODE)
def test_code_is_shown_exactly(text: str) -> None:
    before, after = (renderings(version)["commonmark"] for version in (text, safe_markdown(text)))
    assert [line for line in before.splitlines() if "&lt;" in line] == [
        line for line in after.splitlines() if "&lt;" in line
    ]
    assert "&amp;lt;" not in after


def test_ordinary_answers_are_left_alone() -> None:
    text = '# Title\n\nA *list* of **three**:\n\n- a < b, 1 <2 and x <- y\n- [docs](https://example.org "t")\n- $x < y$'
    assert safe_markdown(text) == text
    assert safe_markdown("<https://example.org> & <mailto:a@b.c>") == "<https://example.org> & <mailto:a@b.c>"
    assert safe_markdown("") == ""


def test_raw_html_is_shown_as_text() -> None:
    shown = renderings(safe_markdown("a <b>c</b> <br/>"))["nbconvert"]
    assert html.unescape(shown).strip() == "<p>a <b>c</b> <br/></p>"


def test_images_become_links_and_links_that_run_become_text() -> None:
    assert safe_markdown("![a cat](https://e/c.png)") == "[a cat](https://e/c.png)"
    assert safe_markdown("![](https://e/c.png)") == "[image](https://e/c.png)"
    assert "<a" not in renderings(safe_markdown("[click](javascript:x)"))["commonmark"]


def test_an_open_fence_is_closed() -> None:
    assert safe_markdown("```python\nx = 1").endswith("x = 1\n```")


@pytest.mark.parametrize("mark", ["[", "![", "`", "](", "` ", "> ", "``` \n", "*", "<b>![a](x) `c` ", "a"])
def test_long_texts_take_no_long_time(mark: str) -> None:
    started = time.process_time()
    safe_markdown(mark * (200_000 // len(mark)))
    assert time.process_time() - started < 5


def test_control_characters_never_pass() -> None:
    text = "a\x1b[31mred\x1b]0;title\x07 \x9b1m \x00 tab\t nl\n cr\r crlf\r\n bell\x07 del\x7f é 日本 \u202e"
    cleaned = clean_text(text)
    assert not [c for c in cleaned if (ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert "crlf\n" in cleaned and "é 日本 \u202e" in cleaned and "tab\t nl\n" in cleaned
    assert "␛[31mred" in cleaned and "\ufffd1m" in cleaned and "␡" in cleaned
    assert "\x1b" not in safe_markdown(text)
