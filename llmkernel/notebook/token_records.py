"""Tokens of a generation as plain records, where log-probabilities were asked for."""

from typing import TYPE_CHECKING, Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.brief_errors import brief

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["token_records"]


def token_records(generation: "Generation") -> list[dict[str, Any]]:
    """A dict per token so far, in the order of the prompts, answers and positions.

    request_id, answer (0 to n-1), position (from 0), token_id, text ("" for a part of a character that a later token
    completes), bytes, logprob (natural logarithm), rank (1 = the likeliest), alternatives: (token_id, text, logprob) of
    the N likeliest and the chosen one, best first. InvalidRequestError where none were kept.
    """
    if generation.options.get("logprobs") is None and all(answer.logprobs is None for answer in generation.outputs):
        raise brief(
            InvalidRequestError(
                f"{generation.id} kept no tokens with their probabilities; ask with --logprobs N.", parameter="logprobs"
            )
        )
    records = []
    for row in generation.rows:
        for answer in row.answers:
            for position, entries in enumerate(answer.logprobs or ()):
                (token_id, chosen), *_ = entries.items()
                likeliest = sorted(entries.items(), key=lambda entry: -entry[1].logprob)
                records.append(
                    {
                        "request_id": row.request_id,
                        "answer": answer.index,
                        "position": position,
                        "token_id": token_id,
                        "text": chosen.decoded_token,
                        "bytes": chosen.token_bytes,
                        "logprob": chosen.logprob,
                        "rank": chosen.rank,
                        "alternatives": [(id, one.decoded_token, one.logprob) for id, one in likeliest],
                    }
                )
    return records
