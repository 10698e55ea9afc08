"""Markdown from a model, made safe to store (design D7): nothing in it runs or fetches when a notebook is shown.

Notebooks are rendered by several parsers (JupyterLab, nbconvert, GitHub), and not all of them sanitise. So the text is
rewritten until no parser can find markup in it: raw HTML is escaped, images become links, links to anything but http,
https, mailto or relative targets become text, and so does TeX's \\href. Code stays exact: block structure comes from
markdown-it's tokens; fences are written anew, unmistakably. Where parsers could disagree about what is code,
its `<` is escaped too: ugly, and safe.
"""

import html
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from llmkernel.notebook.code_spans import code_spans
from llmkernel.notebook.plain_text import clean_text

__all__ = ["safe_markdown"]

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_AUTOLINK = re.compile(r"<(?:https?://|mailto:)[^\s<>`\"'\\]{1,2000}>", re.IGNORECASE)
_IMAGE = re.compile(r"!\[([^\[\]\n`\\]{0,500})\](?=[(\[])")
_DESTINATION = re.compile(r"\s{0,100}(?:<([^<>\n]{0,2000})>|([^\s]{0,2000}))")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_SAFE_SCHEMES = ("http", "https", "mailto")
_INVISIBLE = re.compile("[\x00-\x20\xa0\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff]")
_SPECIAL = re.compile(r"\\<|\\href|\\.|<|!\[|\]\(|\]:", re.DOTALL)
_HREF_TO_THE_WEB = re.compile(r"\\href\s{0,10}\{\s{0,10}https?://[^\s{}\\]{1,2000}\}")
_BLANK_LINE = re.compile(r"(\n[ \t]*\n)")
_RISK = re.compile(r"<(?=[A-Za-z/!?])|!\[|\]\(|\]:|\\href")
_INFO = re.compile(r"[\w+#.-]{1,40}")


def safe_markdown(text: str) -> str:
    """CommonMark that shows `text` and cannot do anything else. Unclosed fences are closed."""
    text = clean_text(text)
    lines = text.split("\n")
    pieces: list[str] = []
    blocks = list(_code_blocks(text))
    tex = _has_tex(_without(lines, blocks))
    position = 0
    for block in blocks:
        start, end = block.map
        if start < position:
            continue
        pieces.append(_safe_prose("\n".join(lines[position:start]), tex))
        pieces.append(_safe_code(block, lines[start:end], tex))
        position = end
    pieces.append(_safe_prose("\n".join(lines[position:]), tex))
    return "\n".join(piece for piece in pieces if piece).strip("\n")


def _code_blocks(text: str) -> Iterator[Any]:
    for token in _parser().parse(text):
        if token.type in ("fence", "code_block"):
            yield token


@cache
def _parser() -> Any:
    from markdown_it import MarkdownIt  # lazy: %load_ext stays fast

    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])  # blocks only: inline text is scanned here
    parser.disable(
        ["html_block", "reference"]
    )  # there is no HTML once we are done; looking for references is quadratic
    return parser


def _without(lines: list[str], blocks: list[Any]) -> str:
    inside = {number for block in blocks for number in range(*block.map)}
    return "\n".join(line for number, line in enumerate(lines) if number not in inside)


def _has_tex(prose: str) -> bool:
    """Whether something outside of code could begin a formula."""
    return any(
        mark in prose and mark in _outside_code(paragraph)
        for mark in ("$", "\\begin", "\\(", "\\[")
        for paragraph in _BLANK_LINE.split(prose)
    )


def _outside_code(paragraph: str) -> str:
    pieces, position = [], 0
    for start, end in code_spans(paragraph):
        pieces.append(paragraph[position:start])
        position = end
    return "".join([*pieces, paragraph[position:]])


def _safe_code(block: Any, source: list[str], tex: bool) -> str:
    """A code block, exact where every parser sees it as code."""
    ends_tex = tex and any(mark in block.content for mark in ("$", "\\end", "\\)", "\\]"))
    clear = block.level == 0 or _is_plainly_fenced(block, source)
    exact = not _RISK.search(block.content) or (clear and not ends_tex)
    if block.level == 0:
        return _fenced(block, block.content if exact else _defused(block.content, block.content, 0))
    return "\n".join(source if exact else (_defused(line, line, 0) for line in source))


def _fenced(block: Any, content: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    info = _INFO.match(block.info.strip())
    body = content if content.endswith("\n") or not content else content + "\n"
    return f"\n{fence}{info[0] if info else ''}\n{body}{fence}\n"


def _is_plainly_fenced(block: Any, source: list[str]) -> bool:
    """A fence inside list items alone: opened and closed with the same indentation, nothing to the left of it."""
    if block.type != "fence" or len(source) < 2 or "`" in block.content:
        return False
    indent = source[0][: len(source[0]) - len(source[0].lstrip(" "))]
    aligned = all(line.startswith(indent) or not line.strip() for line in source)
    return (
        bool(indent)
        and aligned
        and source[0].strip().startswith("```")
        and source[-1] == indent + block.markup
        and "`" not in block.info
    )


def _safe_prose(text: str, tex: bool) -> str:
    return "".join(
        paragraph if not paragraph.strip() else _safe_paragraph(paragraph, tex) for paragraph in _BLANK_LINE.split(text)
    )


def _safe_paragraph(text: str, tex: bool) -> str:
    """Everything between two blank lines: code spans stay, the rest is defused."""
    pieces: list[str] = []
    position = 0
    for start, end in [] if tex and _RISK.search(text) else code_spans(text):
        pieces += [_defused(text[position:start], text, position), text[start:end]]
        position = end
    pieces.append(_defused(text[position:], text, position))
    return "".join(pieces)


def _defused(part: str, whole: str, offset: int) -> str:
    """`part` of a paragraph, without code; `whole[offset:]` begins with it."""
    pieces: list[str] = []
    position = 0
    while found := _SPECIAL.search(part, position):
        pieces.append(part[position : found.start()])
        replacement, position = _replacement(found[0], part, found.start(), whole, offset)
        pieces.append(replacement)
    pieces.append(part[position:])
    return "".join(pieces)


def _replacement(mark: str, part: str, at: int, whole: str, offset: int) -> tuple[str, int]:
    """(what stands for `mark` at `part[at]`, position after it)."""
    after = at + len(mark)
    if mark == "\\<":
        return "&lt;", after
    if mark == "\\href":
        good = _HREF_TO_THE_WEB.match(part, at)
        return (good[0], good.end()) if good else ("\\text", after)
    if mark == "<":
        autolink = _AUTOLINK.match(part, at)
        if autolink:
            return autolink[0], autolink.end()
        if not _TAG.match(part, at):
            return "<", after
        return ("< " if "$" in whole else "&lt;"), after  # TeX would show an entity as it is written
    if mark == "![":
        return _image(part, at)
    if mark in ("](", "]:"):
        if _is_safe_destination(whole, offset + after):
            return mark, after
        return ("]&#40;" if mark == "](" else "]&#58;"), after
    return mark, after  # a backslash and what it escapes


def _image(part: str, at: int) -> tuple[str, int]:
    image = _IMAGE.match(part, at)
    if image is None or part[at - 1 : at] == "!":
        return "&#33;[", at + 2
    return ("[", at + 2) if image[1].strip() else ("[image", at + 2)


def _is_safe_destination(text: str, position: int) -> bool:
    found = _DESTINATION.match(text, position)
    if found is None:
        return False
    target = found[1] if found[1] is not None else found[2]
    if len(target) >= 2000:
        return False
    plain = _INVISIBLE.sub("", re.sub(r"\\(.)", r"\1", html.unescape(html.unescape(target))))
    if plain.startswith("<"):
        return False
    scheme = _SCHEME.match(plain)
    return scheme is None or scheme[1].lower() in _SAFE_SCHEMES
