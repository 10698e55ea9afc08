"""Finds inline code in a paragraph of Markdown, where every parser would find it."""

import re

__all__ = ["code_spans"]

_RUN = re.compile(r"`+")
_BARE_URL = re.compile(r"(?:://|www\.)\S{0,2000}\Z", re.IGNORECASE)


def code_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) of the code spans of `text`, backticks included.

    CommonMark's rule: a run of backticks ends at the next run of the same length. Only plain cases count: a span on one
    line, no `|` in it (tables are cut there). At the first doubtful one the search ends: a backslash before a
    backtick, a run without an end, a span over several lines, a URL right before it (parsers differ on its end).
    """
    runs = [found.span() for found in _RUN.finditer(text)]
    spans: list[tuple[int, int]] = []
    index = 0
    while index < len(runs):
        start, opened = runs[index]
        closing = next((later for later in range(index + 1, len(runs)) if _length(runs[later]) == opened - start), None)
        if closing is None or text[start - 1 : start] == "\\" or _ends_in_url(text, start):
            break
        end = runs[closing][1]
        if "\n" in text[start:end] or "|" in text[start:end]:
            break
        spans.append((start, end))
        index = closing + 1
    return spans


def _ends_in_url(text: str, end: int) -> bool:
    before = text[max(0, end - 2000) : end] if end and not text[end - 1].isspace() else ""
    return _BARE_URL.search(before) is not None


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0]
