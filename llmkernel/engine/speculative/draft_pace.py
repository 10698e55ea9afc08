"""DraftPace: how many drafts are worth their while for one request, from what became of its last ones."""

__all__ = ["DraftPace"]

_LONGEST_PAUSE = 32
"""Tokens between two tries of a request whose drafts are never accepted: then they cost it less than 1 %."""


class DraftPace:
    """A moving average of the drafts accepted at a time. most: drafts of one step at most. average: begins with half.

    All accepted: twice as many the next time. Otherwise the average halves its distance to what was accepted; below
    one half the request pauses, twice as long each time, and one draft is tried after it.
    """

    __slots__ = ("_most", "_pause", "_resumes_at", "average")

    def __init__(self, most: int) -> None:
        self._most = most
        self.average = (most + 1) / 2
        self._pause = 0
        self._resumes_at = 0

    def limit(self, num_tokens: int) -> int:
        """Drafts to try for a text of `num_tokens` tokens; 0 while it pauses."""
        return 0 if num_tokens < self._resumes_at else max(1, round(self.average))

    def record(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Of `num_drafted` drafts so many became text, which has `num_tokens` tokens now."""
        if num_accepted == num_drafted:
            self.average = min(self._most, max(2.0 * num_drafted, self.average))
        else:
            self.average = (self.average + num_accepted) / 2
        if num_accepted:
            self._pause = 0
        elif self.average < 0.5:
            self._pause = min(_LONGEST_PAUSE, max(2, 2 * self._pause))
            self._resumes_at = num_tokens + self._pause
