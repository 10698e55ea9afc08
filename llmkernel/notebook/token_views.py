"""Tokens with their alternatives, as a live view shows them."""

import math

from llmkernel.llm.logprobs import Logprob
from llmkernel.notebook.widgets.messages import Alternative, TokenView

__all__ = ["token_view"]

_LEAST = -9999.0
"""In place of minus infinity, which JSON cannot say."""


def token_view(entries: dict[int, Logprob]) -> TokenView:
    """One position; the chosen token stands first in `entries`, whether it is among the N likeliest or not."""
    (chosen, logprob), *_ = entries.items()
    alternatives = sorted(entries.items(), key=lambda entry: -_finite(entry[1].logprob))
    return TokenView(
        chosen=_alternative(chosen, logprob),
        rank=logprob.rank or 0,
        top=[_alternative(token_id, one) for token_id, one in alternatives],
    )


def _alternative(token_id: int, logprob: Logprob) -> Alternative:
    text, value = logprob.decoded_token or "", round(_finite(logprob.logprob), 5)
    spelled = logprob.token_bytes
    return (token_id, text, value) if spelled is None or _is_text(spelled) else (token_id, text, value, list(spelled))


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:  # a part of a character
        return False
    return True


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
