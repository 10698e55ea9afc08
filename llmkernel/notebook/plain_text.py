"""Model text without control characters: what a terminal, a log or `text/plain` may be given."""

import re

__all__ = ["clean_text"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DELETE = 0x7F


def clean_text(text: str) -> str:
    """`text` with newline and tab as the only control characters.

    "\\r\\n" becomes a newline; other C0 characters and DEL are shown as their pictures (U+2400 to U+2421), C1 as
    U+FFFD. Without ESC and C1 an OSC or ANSI sequence is plain text.
    """
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == _DELETE else "\ufffd"
