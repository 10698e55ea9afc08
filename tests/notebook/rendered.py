"""What a browser would make of rendered Markdown: does anything in it run, or fetch?"""

from html.parser import HTMLParser

from markdown_it import MarkdownIt
from nbconvert.filters.markdown_mistune import markdown2html_mistune

__all__ = ["dangers_in", "renderings"]

_TAGS = (
    " p a h1 h2 h3 h4 h5 h6 ul ol li dl dt dd pre code div span em strong blockquote hr br table thead tbody tr th td"
    " del s sup section "
)
_SCHEMES = ("javascript:", "data:", "vbscript:", "file:")


class _Watch(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if f" {tag} " not in _TAGS:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            target = (value or "").strip().lower()
            if name.startswith("on") or name in ("src", "style", "srcdoc"):
                self.found.append(f"{tag} {name}={value}")
            if name == "href" and target.startswith(_SCHEMES):
                self.found.append(f"{tag} href={value}")

    def handle_comment(self, data: str) -> None:
        self.found.append(f"<!--{data}")

    def handle_decl(self, decl: str) -> None:
        self.found.append(f"<!{decl}")

    def handle_pi(self, data: str) -> None:
        self.found.append(f"<?{data}")


def dangers_in(html: str) -> list[str]:
    watch = _Watch()
    watch.feed(html)
    watch.close()
    return watch.found


def renderings(markdown: str) -> dict[str, str]:
    """As nbconvert makes HTML of it (mistune, nothing sanitised), and as CommonMark with HTML and any link allowed."""
    commonmark = MarkdownIt("commonmark", {"html": True}).enable("table")
    commonmark.validateLink = lambda _url: True  # type: ignore[method-assign]
    return {"nbconvert": markdown2html_mistune(markdown), "commonmark": commonmark.render(markdown)}
