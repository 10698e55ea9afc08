"""StopStrings: finds the strings that end a text, and says what may not be shown yet because it may be one."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopMatch", "StopStrings"]


class StopMatch(NamedTuple):
    """The stop string that was found, and where it stands in the text: text[start:end]."""

    stop: str
    start: int
    end: int


class StopStrings:
    """The stop strings of one request, in the order in which they were given."""

    __slots__ = ("_longest", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, known: int, allowed_from: int) -> StopMatch | None:
        """The stop string that ends earliest in `text` (of several, the one that was given first).

        known: characters that were searched before without a match. allowed_from: no match may start before this.
        """
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop, max(allowed_from, known - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best.end):
                best = StopMatch(stop, start, start + len(stop))
        return best

    def held(self, text: str, allowed_from: int) -> int:
        """Characters at the end of `text` that are the beginning of a stop string."""
        if not text.endswith(self._prefixes):
            return 0
        room = len(text) - allowed_from
        return next((len(prefix) for prefix in self._prefixes if len(prefix) <= room and text.endswith(prefix)), 0)
