"""The messages between the views in the browser and the kernel: extension/src/model.ts, field by field.

That file says what each field means; a test holds the two together. Messages travel as JSON: `pack` makes one,
`unpack` reads one that a view sent and answers None for anything else.
"""

from typing import Any

import msgspec

__all__ = [
    "Alternative",
    "Cancel",
    "Counters",
    "DashboardFrame",
    "DashboardSnapshot",
    "DashboardUp",
    "EngineSample",
    "Frame",
    "Heard",
    "Hello",
    "Hop",
    "LoadState",
    "Part",
    "RequestRow",
    "Resync",
    "RowSnapshot",
    "Shown",
    "Snapshot",
    "Stop",
    "StopUp",
    "StreamUp",
    "TokenView",
    "Trace",
    "TraceRequest",
    "Visible",
    "Want",
    "pack",
    "unpack",
]

Alternative = tuple[int, str, float] | tuple[int, str, float, list[int]]
"""id, text, logprob, bytes where the text is not whole."""


class Counters(msgspec.Struct, omit_defaults=True):
    """What changed in the counters of a row; absent = unchanged."""

    state: str | None = None
    tokens: int | None = None
    rate: float | None = None
    ttft: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    note: str | None = None
    finish_reason: str | None = None
    error: str | None = None


class TokenView(msgspec.Struct):
    """A generated token with its alternatives, best first."""

    chosen: Alternative
    rank: int
    top: list[Alternative]


class RowSnapshot(Counters, kw_only=True):
    """A row in full."""

    id: str
    label: str
    text: str
    token_views: list[TokenView] | None = None


class Snapshot(msgspec.Struct, tag_field="t", tag="snapshot"):
    """All there is."""

    seq: int
    rows: list[RowSnapshot]


class Frame(msgspec.Struct, tag_field="t", tag="frame", omit_defaults=True):
    """What is new since the last frame."""

    seq: int
    d: list[tuple[int, str]] = []
    c: list[tuple[int, Counters]] = []
    k: list[tuple[int, list[TokenView]]] = []


class Hello(msgspec.Struct, tag_field="t", tag="hello"):
    """A view is mounted."""


class Resync(msgspec.Struct, tag_field="t", tag="resync"):
    """A view missed a frame."""

    have: int


class Visible(msgspec.Struct, tag_field="t", tag="visible"):
    """Rows on screen in one view."""

    view: str
    rows: list[int]


class Shown(msgspec.Struct, tag_field="t", tag="shown"):
    """Rows whose first text is on screen."""

    rows: list[int]


class Want(msgspec.Struct, tag_field="t", tag="want"):
    """A part of the browser's program that is needed now."""

    part: str


class Part(msgspec.Struct, tag_field="t", tag="part"):
    """The source of that part."""

    part: str
    source: str


class Stop(msgspec.Struct, tag_field="t", tag="stop"):
    """End these requests."""

    ids: list[str]


class Cancel(msgspec.Struct, tag_field="t", tag="cancel"):
    """End the load of this model."""

    model: str


class Heard(msgspec.Struct, tag_field="t", tag="heard"):
    """The stop channel's answer, from inside its handler."""


class RequestRow(Counters, kw_only=True):
    """A row of the dashboard's table."""

    id: str
    cell: int
    model: str
    position: int | None = None
    itl: float | None = None
    preemptions: int | None = None
    prompt: str | None = None


class EngineSample(msgspec.Struct):
    """One sample of an engine."""

    time: float
    running: int
    waiting: int
    tokens_in: float
    tokens_out: float
    kv_usage: float
    hit_rate: float
    preemptions: int
    step_time: float
    memory: int
    cpu: float
    threads: int


class DashboardFrame(msgspec.Struct, tag_field="t", tag="stats"):
    """A sample, and the rows that changed."""

    seq: int
    model: str
    engine_state: str
    sample: EngineSample
    rows: list[RequestRow]
    log: list[str]


class DashboardSnapshot(msgspec.Struct, tag_field="t", tag="all"):
    """Everything that a dashboard shows."""

    seq: int
    model: str
    engine_state: str
    samples: list[EngineSample]
    rows: list[RequestRow]
    log: list[str]


class TraceRequest(msgspec.Struct, tag_field="t", tag="trace"):
    """Show the way of this request."""

    id: str


class Hop(msgspec.Struct, omit_defaults=True):
    """A hop of a request's way."""

    name: str
    at: float
    detail: str | None = None
    where: str = "kernel"


class Trace(msgspec.Struct, tag_field="t", tag="trace"):
    """The way of a request."""

    id: str
    hops: list[Hop]


class LoadState(msgspec.Struct, omit_defaults=True):
    """How a load stands."""

    model: str
    title: str
    state: str
    words: str
    stages: list[str] = []
    at: int = 0
    share: float | None = None
    seconds: float = 0.0


StreamUp = Hello | Resync | Visible | Shown | Want
StopUp = Hello | Stop | Cancel
DashboardUp = Hello | Resync | TraceRequest


def pack(message: msgspec.Struct) -> Any:
    """`message` as JSON values, for a comm or a trait."""
    return msgspec.to_builtins(message)


def unpack(content: object, kinds: Any) -> Any:
    """The message of one of `kinds` (StreamUp, StopUp, DashboardUp) that a view sent; None if it is none of them."""
    try:
        return msgspec.convert(content, kinds)
    except msgspec.ValidationError:
        return None
