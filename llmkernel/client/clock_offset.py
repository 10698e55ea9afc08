"""ClockOffset: how far the engine's clock is from ours, from messages that were sent anyway."""

import math

__all__ = ["ClockOffset"]


class ClockOffset:
    """What to add to the engine's time.monotonic() to have ours, seconds.

    No message arrives before it is sent, so every one that carries a time bounds the offset. On Linux all processes of
    a machine read the same clock: 0 is taken wherever the bounds allow it. Elsewhere it is the middle between them, or
    the one that there is. A time of 0.0 says nothing: an older peer.
    """

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf

    def heard(self, theirs: float, ours: float) -> None:
        """What the engine sent at `theirs` was here at `ours`."""
        if theirs:
            self._most = min(self._most, ours - theirs)

    def told(self, ours: float, theirs: float) -> None:
        """What we sent at `ours` was there at `theirs`."""
        if theirs:
            self._least = max(self._least, ours - theirs)

    @property
    def seconds(self) -> float:
        if self._least <= 0.0 <= self._most:
            return 0.0
        if math.isinf(self._least) or math.isinf(self._most):
            return self._most if math.isinf(self._least) else self._least
        return (self._least + self._most) / 2
