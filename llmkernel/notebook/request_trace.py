"""The way of one request, from the times that its statistics hold."""

import time
from typing import TYPE_CHECKING

from llmkernel.notebook.widgets.messages import Hop

if TYPE_CHECKING:
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["hops_of", "trace_text"]

_BAR = 30


def hops_of(row: "GenerationRow") -> list[Hop]:
    """The hops that are behind `row`, in order; `at`: seconds after it was submitted.

    Submission is told by the wall clock, the engine's hops by the monotonic clock, which all processes of a machine
    share: the first is carried over with the difference of the two clocks now.
    """
    output = row.output
    stats = output.metrics if output is not None else None
    hops = [Hop("submitted", 0.0)]
    if stats is None or not stats.queued_ts:
        return hops
    submitted = stats.arrival_time - (time.time() - time.monotonic())
    tokens = stats.num_generation_tokens
    preempted = f"preempted {stats.num_preemptions} times" if stats.num_preemptions else None
    cached = f", {stats.num_cached_tokens} of them cached" if stats.num_cached_tokens else ""
    for name, moment, detail in (
        ("queued", stats.queued_ts, None),
        ("scheduled", stats.scheduled_ts, f"prompt of {stats.num_prompt_tokens} tokens{cached}"),
        ("first token", stats.first_token_ts, None),
        (
            "finished" if row.done else f"token {tokens}",
            stats.last_token_ts if tokens > 1 or row.done else 0.0,
            preempted,
        ),
    ):
        if moment:
            hops.append(Hop(name, max(moment - submitted, hops[-1].at), detail))
    return hops


def trace_text(request_id: str, hops: list[Hop]) -> str:
    """The way as lines of text: name, time since the hop before, time since the submission, a bar."""
    end = max(hops[-1].at, 1e-6)
    lines = [f"Request {request_id}"]
    before = 0.0
    for hop in hops:
        bar = " " * round(before / end * _BAR) + "█" * max(1, round((hop.at - before) / end * _BAR))
        since, total = f"+{1000 * (hop.at - before):.1f} ms", f"{1000 * hop.at:.1f} ms"
        lines.append(f"  {hop.name:12} {since:>12} {total:>12}  {bar:{_BAR + 1}}  {hop.detail or ''}".rstrip())
        before = hop.at
    return "\n".join(lines)
