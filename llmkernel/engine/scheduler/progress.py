"""Where the requests stand that bring no tokens, for whoever asks; nothing is counted while nobody does."""

from collections.abc import Iterator

from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.scheduler import COMPILING, Scheduler
from llmkernel.protocol.stats import RequestProgress

__all__ = ["MOST_TOLD", "request_progress"]

MOST_TOLD = 1024
"""Requests that one answer tells of: those that are read first, then those that wait, the next ones first."""


def request_progress(scheduler: Scheduler, client_index: int) -> list[RequestProgress]:
    """Of the requests of that client, between two steps."""
    told: list[RequestProgress] = []
    for request, position, reason in _without_tokens(scheduler):
        if request.client_index != client_index:
            continue
        if len(told) == MOST_TOLD:
            break
        told.append(
            RequestProgress(
                request.request_id,
                position,
                reason,
                request.num_computed_tokens,
                request.num_tokens,
                max(request.num_cached_tokens, 0),
                request.num_preemptions,
            )
        )
    return told


def _without_tokens(scheduler: Scheduler) -> Iterator[tuple[Request, int, str]]:
    for request in scheduler.running:
        if request.reads_prompt:
            yield request, 0, ""
    place = 0
    for place, request in enumerate(scheduler.waiting, 1):
        yield request, place, scheduler.why_waiting(request)
    for later, request in enumerate(scheduler.compiling.values(), place + 1):
        yield request, later, COMPILING
