"""PrefillPacer: how many prompt tokens a step may read while others decode, so that their streams do not stall."""

__all__ = ["PrefillPacer"]

STRETCH = 2.0
"""A step that reads prompts beside decodes aims at so many times the length of one that only decodes."""

NOT_FELT = 0.010
"""Seconds that a step may take in any case."""

LEAST = 32
"""Prompt tokens that a step may always read: they come to their end, however slow the machine."""

_DECODE_WEIGHT = 0.2
_READ_WEIGHT = 0.5
"""Of the newest step in the running means. Reading gets slower along a prompt, so its mean must follow fast."""


class PrefillPacer:
    """Learns from the steps what a decode and what a prompt token cost (Sarathi-Serve's aim, arXiv:2403.02310, with
    the chunk measured and not configured).

    most: tokens of any step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def limit(self) -> int:
        """Prompt tokens of a step in which somebody decodes."""
        if not self._token_seconds:
            return self._most
        decode = self._decode_seconds or 0.0
        tokens = int((max(STRETCH * decode, NOT_FELT) - decode) / self._token_seconds)
        return min(self._most, max(LEAST, tokens))

    def observe(self, *, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step has run: so many requests that got one token, so many tokens of prompts."""
        if not prompt_tokens:
            if decodes:
                self._decode_seconds = _mean(self._decode_seconds, seconds, _DECODE_WEIGHT)
            return
        alone = (self._decode_seconds or 0.0) if decodes else 0.0
        self._token_seconds = _mean(self._token_seconds, max(0.0, seconds - alone) / prompt_tokens, _READ_WEIGHT)


def _mean(before: float | None, now: float, weight: float) -> float:
    return now if before is None else before + weight * (now - before)
