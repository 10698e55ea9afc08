"""PrefillPacer: how many prompt tokens a step may read while others decode, so that their streams do not stall."""

__all__ = ["SHORT_PROMPT", "PrefillPacer"]

STRETCH = 1.0
"""By so many of its lengths a step that only decodes may be stretched for prompts. Times the square of those who wait
for their first token: two of them weigh more than even streams, and where many do nearly the whole budget is theirs."""

NOT_FELT = 0.010
"""Seconds that a step may take in any case."""

SHORT_PROMPT = 256
"""Tokens up to which a prompt is read in one piece all the same, past longer ones: a first token that is soon there."""

LEAST = 8
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
        self._decode_seconds = 0.0
        self._token_seconds = 0.0

    def limit(self, waiting: int) -> int:
        """Prompt tokens of a step in which somebody decodes, and so many wait for their first token.

        While no step has only decoded, nothing is known that could be stretched: the first prompts are read whole.
        """
        if not self._token_seconds or not self._decode_seconds:
            return self._most
        decode = self._decode_seconds
        extra = max(STRETCH * waiting**2 * decode, NOT_FELT - decode)
        return min(self._most, max(LEAST, int(extra / self._token_seconds)))

    def observe(self, *, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step has run: so many requests that got one token, so many tokens of prompts."""
        if prompt_tokens:
            extra = max(0.0, seconds - self._decode_seconds) if decodes else seconds
            self._token_seconds = _mean(self._token_seconds, extra / prompt_tokens, _READ_WEIGHT)
        elif decodes:
            self._decode_seconds = _mean(self._decode_seconds, seconds, _DECODE_WEIGHT)


def _mean(before: float, now: float, weight: float) -> float:
    return before + weight * (now - before) if before else now
