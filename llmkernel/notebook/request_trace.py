"""The way of one request from the cell to the screen (systems.md A-147), hop by hop."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.stats import RequestStateStats
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.widgets.messages import Hop
from llmkernel.protocol.outputs import EngineCoreEvent, EngineCoreEventType

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["MOST_SHOWN", "hops_of", "trace_text"]

MOST_SHOWN = 8
"""Requests of one generation whose ways are told at once."""

_BAR = 30
_LOAD = 0.05
"""Seconds between the cell and the submission from which on the load of the model was waited for."""


def hops_of(feed: RowFeed) -> list[Hop]:
    """The hops that are behind an answer, in order; `at`: seconds after the cell asked.

    Times of the engine are carried over to this process's clock. A hop never stands before the one that caused it,
    whatever the clocks say.
    """
    start, stats = feed.row.submitted, feed.metrics
    hops = [Hop("submitted", 0.0)]
    if stats is not None:
        for name, moment, where, detail in _way_to_the_first_text(feed, stats):
            hops.append(Hop(name, max(moment - start, hops[-1].at), detail, where))
        for name, moment, where, detail in sorted(_rest(feed, stats), key=lambda rest: rest[1]):
            hops.append(Hop(name, max(moment - start, hops[-1].at), detail, where))
    return [*hops, *_now(feed)]


_Moment = tuple[str, float, str, str | None]
"""Name, time of this process's monotonic clock, where, detail."""


def _way_to_the_first_text(feed: RowFeed, stats: RequestStateStats) -> Iterator[_Moment]:
    way, offset = stats.way, stats.way.clock_offset
    if way.submitted - feed.row.submitted > _LOAD:
        yield "model ready", way.submitted, "kernel", None
    if way.sent:
        yield "ADD sent", way.sent, "kernel", None
    for event in _early(stats):
        yield _event(event, stats)
    if stats.first_token_ts:
        yield "first token", stats.first_token_ts + offset, "engine", None
    for name, moment, where in (
        ("pushed", way.pushed + offset if way.pushed else 0.0, "engine"),
        ("received", way.received, "kernel"),
        ("detokenized", way.decoded, "kernel"),
    ):
        if moment:
            yield name, moment, where, None


def _rest(feed: RowFeed, stats: RequestStateStats) -> Iterator[_Moment]:
    """What may happen in any order."""
    way, tokens = stats.way, stats.num_generation_tokens
    for event in way.events[len(_early(stats)) :]:
        yield _event(event, stats)
    if way.on_screen:
        yield "on screen", way.on_screen, "page", "the first text, as told by the page"
    if way.ended:
        reason = feed.row.answers[feed.index].finish_reason
        rate = f", {stats.tokens_per_second:.1f} tok/s" if stats.tokens_per_second else ""
        yield "finished", way.ended, "kernel", f"{reason or 'ended'}, {tokens} tokens{rate}"
    elif tokens > 1:
        yield f"token {tokens}", stats.last_token_ts + way.clock_offset, "engine", None


def _early(stats: RequestStateStats) -> list[EngineCoreEvent]:
    """Events before the first token."""
    events = stats.way.events
    return [one for one in events if not stats.first_token_ts or one.timestamp <= stats.first_token_ts]


def _event(event: EngineCoreEvent, stats: RequestStateStats) -> _Moment:
    name, detail = event.type.name.lower(), None
    tokens = f"{event.tokens:,}"
    match event.type:
        case EngineCoreEventType.PREFILLED:
            name, detail = "prefill", f"{tokens} of {max(stats.num_prompt_tokens, event.tokens):,} tokens"
        case EngineCoreEventType.SCHEDULED if event.timestamp == stats.scheduled_ts:
            cached = f", {tokens} of them cached" if event.tokens else ""
            detail = f"prompt of {stats.num_prompt_tokens:,} tokens{cached}"
        case EngineCoreEventType.SCHEDULED:
            name, detail = "resumed", f"{tokens} tokens cached"
        case EngineCoreEventType.PREEMPTED:
            detail = "KV memory went to others"
    return name, event.timestamp + stats.way.clock_offset, "engine", detail


def _now(feed: RowFeed) -> Iterator[Hop]:
    """What a request that brings no tokens waits for."""
    if (wait := feed.look()) is not None:
        at = time.monotonic() - feed.row.submitted
        yield Hop("now", at, str(wait), "kernel" if feed.row.slot.loading else "engine")


def trace_text(generation: "Generation", id: str = "") -> str:
    """The ways of the requests that `id` means, as lines of text; without one of the first few of the generation."""
    feeds = RowFeed.of(generation)
    if id not in ("", generation.id):
        feeds = [feed for feed in feeds if id in (feed.request_id, feed.row.request_id)]
        if not feeds:
            raise brief(InvalidRequestError(f"{generation.id} has no request {id!r}; %llm trace {generation.id}."))
    texts = [_way_text(feed.request_id, hops_of(feed)) for feed in feeds[:MOST_SHOWN]]
    if len(feeds) > MOST_SHOWN:
        example = feeds[MOST_SHOWN].request_id
        texts.append(f"{len(feeds) - MOST_SHOWN} more; name one, for example %llm trace {example}.")
    return "\n".join(texts)


def _way_text(request_id: str, hops: list[Hop]) -> str:
    """A line per hop: where, name, time since the hop before, time since the cell asked, a bar, detail."""
    end = max(hops[-1].at, 1e-6)
    lines = [f"Request {request_id}"]
    before = 0.0
    for hop in hops:
        bar = " " * round(before / end * _BAR) + "█" * max(1, round((hop.at - before) / end * _BAR))
        since, total = f"+{1000 * (hop.at - before):.1f} ms", f"{1000 * hop.at:.1f} ms"
        line = f"  {hop.where:7} {hop.name:12} {since:>12} {total:>12}  {bar:{_BAR + 1}}  {hop.detail or ''}"
        lines.append(line.rstrip())
        before = hop.at
    return "\n".join(lines)
