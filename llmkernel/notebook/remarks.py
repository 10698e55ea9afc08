"""What a reader should know about the answers of a generation, printed beside them."""

from typing import TYPE_CHECKING

from llmkernel.notebook.settings import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["print_remarks", "remarks"]


def print_remarks(generation: "Generation") -> None:
    for remark in remarks(generation):
        print(remark)  # noqa: T201 - beside the answer, which stays exact


def remarks(generation: "Generation") -> list[str]:
    """A line each."""
    reasons = [answer.finish_reason for answer in generation.outputs]
    lines = list(generation.notes)
    count = reasons.count("length")
    if count:
        who = "The answer" if len(reasons) == 1 else f"{count} of {len(reasons)} answers"
        lines.append(f"{who} stopped at {_limit(generation)}.")
    failed = sum(error is not None for error in generation.errors)
    if failed and len(generation.rows) > 1:
        lines.append(f"{failed} of {len(generation.rows)} requests failed; `.errors` of the result says why.")
    return lines


def _limit(generation: "Generation") -> str:
    asked = generation.options.get("max_tokens", DEFAULT_MAX_TOKENS)
    lengths = [len(answer.token_ids) for answer in generation.outputs if answer.finish_reason == "length"]
    if max(lengths) < asked:
        return f"{max(lengths)} tokens, where the context ends; load the model with a larger --max-model-len"
    return f"max_tokens = {asked}; raise it with --max-tokens"
