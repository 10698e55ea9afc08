"""The output that a notebook stores for a generation: text/markdown and text/plain, with metadata, and no widget."""

from typing import TYPE_CHECKING, Any

from llmkernel.notebook.card import described_model, described_params, described_prompt
from llmkernel.notebook.markdown_safety import safe_markdown
from llmkernel.notebook.plain_text import clean_text

if TYPE_CHECKING:
    from llmkernel.llm.outputs import CompletionOutput
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["final_bundle", "live_data", "row_label"]

_LABEL_LENGTH = 60


def final_bundle(generation: "Generation") -> tuple[dict[str, Any], dict[str, Any]]:
    """(data by mimetype, metadata). With the option `plain` there is no Markdown."""
    return live_data(generation), {"llmkernel": _record(generation)}


def live_data(generation: "Generation") -> dict[str, Any]:
    """The answers as they stand; several of them are numbered, and a failure is told in its place."""
    shown = [(row, answer) for row in generation.rows for answer in row.answers]
    single = len(shown) == 1
    labels = [row_label(generation, row, answer.index) for row, answer in shown]
    told_elsewhere = single and generation.raises
    plain = "\n\n".join(
        _plain_text(row, answer, told_elsewhere) if single else f"{label}\n{_plain_text(row, answer, told_elsewhere)}"
        for (row, answer), label in zip(shown, labels, strict=True)
    )
    if generation.options.get("plain"):
        return {"text/plain": plain}
    markdown = "\n\n".join(
        _markdown(row, answer, told_elsewhere)
        if single
        else f"**{safe_markdown(label)}**\n\n{_markdown(row, answer, told_elsewhere)}"
        for (row, answer), label in zip(shown, labels, strict=True)
    )
    return {"text/markdown": markdown, "text/plain": plain}


def _plain_text(row: "GenerationRow", answer: "CompletionOutput", told_elsewhere: bool) -> str:
    text = clean_text(answer.text)
    return text if row.error is None or told_elsewhere else f"{text}\n[failed: {_one_line(row.error)}]".lstrip()


def _markdown(row: "GenerationRow", answer: "CompletionOutput", told_elsewhere: bool) -> str:
    text = row.markdown_of(answer)
    return (
        text
        if row.error is None or told_elsewhere
        else f"{text}\n\n*failed: {safe_markdown(_one_line(row.error))}*".lstrip()
    )


def row_label(generation: "Generation", row: "GenerationRow", index: int) -> str:
    """ "[2]", "[2.1]" for one of several answers to the second of several prompts; with the prompt's beginning."""
    if len(generation.slots) > 1:
        return _label_with_model(generation, row, index)
    number = generation.rows.index(row) + 1
    if len(generation.rows) == 1:
        return f"[{index + 1}]"
    place = f"[{number}.{index + 1}]" if len(row.answers) > 1 else f"[{number}]"
    words = " ".join(clean_text(row.prompt.text).split())
    return f"{place} {words if len(words) <= _LABEL_LENGTH else words[: _LABEL_LENGTH - 1] + '…'}".rstrip()


def _label_with_model(generation: "Generation", row: "GenerationRow", index: int) -> str:
    """ "smollm2", "[2] smollm2", "[2.1] smollm2": which model's answer it is."""
    number = generation.rows.index(row) // len(generation.slots) + 1
    places = [str(number)] if len(generation.rows) > len(generation.slots) else []
    places += [str(index + 1)] if len(row.answers) > 1 else []
    return f"[{'.'.join(places)}] {row.slot.name}" if places else row.slot.name


def _one_line(error: Exception) -> str:
    return " ".join(clean_text(str(error)).split()) or type(error).__name__


def _record(generation: "Generation") -> dict[str, Any]:
    """What was asked, of what, and what it took: model, params, weights and versions, and per request its prompt, seed,
    usage and finish reasons. Enough to ask again: see card.py."""
    requests = [_request_record(row) for row in generation.rows]
    if len(generation.slots) > 1:
        requests = [{"model": row.slot.name, **one} for row, one in zip(generation.rows, requests, strict=True)]
    record = {"model": generation.model, "id": generation.id, "params": _params(generation)}
    asked = {row.slot.name: described_model(row.facts) for row in generation.rows if row.facts is not None}
    if asked:
        record["weights"] = next(iter(asked.values())) if len(generation.slots) == 1 else asked
    return record | (requests[0] if len(requests) == 1 else {"requests": requests})


def _request_record(row: "GenerationRow") -> dict[str, Any]:
    output = row.output
    reasons = [answer.finish_reason for answer in row.answers]
    params = output.sampling_params if output is not None else None
    record: dict[str, Any] = {
        "request_id": row.request_id,
        **described_prompt(output),
        "seed": params.seed if params is not None else None,
        "finish_reason": reasons[0] if len(reasons) == 1 else reasons,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids or ()) if output is not None else 0,
            "completion_tokens": sum(len(answer.token_ids) for answer in row.answers),
            "cached_tokens": (output.num_cached_tokens or 0) if output is not None else 0,
        },
    }
    return record if row.error is None else record | {"error": _one_line(row.error)}


def _params(generation: "Generation") -> dict[str, Any]:
    """SamplingParams as sent (defaults left out), and how the prompt was made."""
    sent = next((row.output.sampling_params for row in generation.rows if row.output is not None), None)
    params = described_params(sent)  # each request has a seed of its own
    shaping = {name: generation.options[name] for name in ("raw", "system") if generation.options.get(name)}
    return params | shaping
