"""Answers as plain records, one for each: the rows of a table."""

from typing import TYPE_CHECKING, Any

from llmkernel.errors import UnsupportedFeatureError
from llmkernel.notebook.brief_errors import brief

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["answer_frame", "answer_records"]


def answer_records(generation: "Generation") -> list[dict[str, Any]]:
    """A dict per answer, in the order of the prompts.

    request_id, model, prompt (as it was asked, without the chat template), answer (0 to n-1), text, finish_reason,
    error (None where it did not fail), tokens, prompt_tokens, cached_tokens, time_to_first_token (seconds; None where
    nothing came), cumulative_logprob (None unless asked for).
    """
    return [record for row in generation.rows for record in _records(row)]


def answer_frame(generation: "Generation") -> Any:
    """The records as a pandas DataFrame; UnsupportedFeatureError where pandas is not installed."""
    try:
        import pandas  # lazy: an extra of the user's, and heavy
    except ImportError:
        raise brief(
            UnsupportedFeatureError("pandas is not installed; pip install pandas, or use to_dicts().")
        ) from None
    return pandas.DataFrame(answer_records(generation))


def _records(row: "GenerationRow") -> list[dict[str, Any]]:
    output = row.output
    metrics = output.metrics if output is not None else None
    return [
        {
            "request_id": row.request_id,
            "model": row.slot.name,
            "prompt": row.prompt.text,
            "answer": answer.index,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "error": str(row.error) if row.error is not None else None,
            "tokens": len(answer.token_ids),
            "prompt_tokens": len(output.prompt_token_ids or ()) if output is not None else 0,
            "cached_tokens": (output.num_cached_tokens or 0) if output is not None else 0,
            "time_to_first_token": metrics.time_to_first_token if metrics is not None else None,
            "cumulative_logprob": answer.cumulative_logprob,
        }
        for answer in row.answers
    ]
