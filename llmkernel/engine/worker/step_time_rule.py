"""StepTimeRule: the number of threads that makes steps short, found by trying, where no counter speaks of the load."""

import statistics

__all__ = ["StepTimeRule"]

SLOW = 1.6
"""A step that takes so many times the best of its kind was held up."""

BETTER = 0.9
"""Another number of threads is taken if its steps take at most this part of the time."""

TRIAL = 2
"""Steps of a trial, and slow steps in a row that bring one about."""

FIRST_WAIT, LONGEST_WAIT = 8, 256
"""Steps between two trials: doubled whenever a trial changes nothing. The last makes trials cost below 1 percent."""

AGEING = 1.005
"""What a best time grows by with each step: contexts grow."""


class StepTimeRule:
    """A thread rule: walks on most, most / 2, ... 1. Only steps of equally many tokens are compared.

    Every so often it tries a lower or a higher number, one farther away after each trial in vain; and a lower one at
    once when two steps in a row are slow.
    """

    def __init__(self, most: int) -> None:
        self._ladder = [most]
        while self._ladder[-1] > 1:
            self._ladder.append(self._ladder[-1] // 2)
        self._rung = 0
        self._toward = 1  # on the ladder: 1 is fewer threads, -1 more
        self._stride = 1
        self._wait = FIRST_WAIT
        self._begin_kind(0)

    def threads(self, now: float) -> int:
        return self._ladder[self._trial]

    def took(self, threads: int, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds` with `threads`; one that ran with others than ours says nothing."""
        if tokens != self._tokens:
            self._begin_kind(tokens)
        if threads != self._ladder[self._trial]:
            return
        if self._trial == self._rung:
            self._watch(seconds)
        else:
            self._judge(seconds)

    def _begin_kind(self, tokens: int) -> None:
        self._tokens = tokens
        self._best = float("inf")
        self._begin_watch()

    def _begin_watch(self) -> None:
        self._trial = self._rung
        self._recent: list[float] = []
        self._tried: list[float] = []

    def _watch(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._best = min(self._best * AGEING, seconds)
        last = self._recent[-TRIAL:]
        held_up = len(last) == TRIAL and min(last) > SLOW * self._best
        if held_up:
            self._recent = last
            self._toward, self._stride, self._wait = 1, 1, FIRST_WAIT
        if held_up or len(self._recent) >= self._wait:
            self._begin_trial()

    def _begin_trial(self) -> None:
        if not 0 <= self._rung + self._toward < len(self._ladder):
            self._toward = -self._toward
        last = len(self._ladder) - 1
        self._trial = min(last, max(0, self._rung + self._toward * self._stride))
        if self._trial == self._rung:  # one thread is all there is
            self._begin_watch()

    def _judge(self, seconds: float) -> None:
        self._tried.append(seconds)
        if len(self._tried) < TRIAL:
            return
        usual = statistics.median(self._recent)
        if min(self._tried) < BETTER * usual:
            self._rung, self._best = self._trial, min(self._tried)
            self._stride, self._wait = 1, FIRST_WAIT
        else:
            self._toward, self._best = -self._toward, usual
            self._stride, self._wait = self._stride % len(self._ladder) + 1, min(LONGEST_WAIT, 2 * self._wait)
        self._begin_watch()
