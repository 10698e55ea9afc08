"""The control channel: what works while everything else is busy. A ROUTER in the engine, served by a thread of its own
that starts before the model's libraries are imported; anybody of the same user may connect a DEALER to it.

    Ping      -> Pong       is it alive, and since when does its step run
    Status    -> EngineStatus   everything that `llmkernel ps` and `%llm status` tell
    Abort     -> Done       end these requests
    Attach    -> Attached   one more client: where it listens
    Detach    -> Done       a client leaves; its requests are aborted
    KeepAlive -> Done       how long the engine stays without an owner
    Shutdown  -> Done       end the engine
    (any)     -> Refused    with the reason

A client attaches by binding its two sockets first; it then hears on the input one, once the model is loaded, the same
registration as the owner. The engine watches its process, and detaches it when that ends.

An engine that is kept alive watches its owner in the same way. When that is gone, its requests end and a lease runs;
meanwhile a client may attach as the new owner.

Frames of a question and of an answer: a number that the asker chose (so that late answers are recognised), msgpack.
"""

from typing import Any

import msgspec

from llmkernel.protocol.handshake import Progress

__all__ = [
    "FIRST_ATTACHED",
    "Abort",
    "Answer",
    "Attach",
    "Attached",
    "ClientStatus",
    "Detach",
    "Done",
    "EngineStatus",
    "KeepAlive",
    "Ping",
    "Pong",
    "Question",
    "Refused",
    "Shutdown",
    "Status",
]


FIRST_ATTACHED = 1000
"""client_index of the first client that attaches; those below are named in the owner's INIT. None is used twice."""


class Ping(msgspec.Struct, tag_field="ask", tag="PING"):
    """Are you there?"""


class Status(msgspec.Struct, tag_field="ask", tag="STATUS"):
    """What are you doing?"""


class Abort(msgspec.Struct, tag_field="ask", tag="ABORT"):
    """End these requests, whatever they are at. Unknown ids are ignored."""

    request_ids: list[str]


class Attach(msgspec.Struct, tag_field="ask", tag="ATTACH", omit_defaults=True):
    """One more client. input and output: addresses that it has bound, on 127.0.0.1 or in the run directory: there they
    are called i and o, each with six hexadecimal digits, and removed when the client leaves.

    pid: of the client's process; when it is gone the client is detached. Asked twice, it has the same answer.
    owner: it takes the place of an owner that is gone; refused while there is one, and where no lease runs.
    """

    input: str
    output: str
    pid: int
    owner: bool = False


class Detach(msgspec.Struct, tag_field="ask", tag="DETACH"):
    """The client leaves; its requests are aborted."""

    client_index: int


class KeepAlive(msgspec.Struct, tag_field="ask", tag="KEEP_ALIVE"):
    """Stay for `seconds` when your owner is gone, in place of what was said at your start; 0: leave with it.

    Only for an engine that is kept alive.
    """

    seconds: float


class Shutdown(msgspec.Struct, tag_field="ask", tag="SHUTDOWN"):
    """End the engine: its requests are aborted, the process exits."""


class Done(msgspec.Struct, tag_field="answer", tag="DONE"):
    """It is done, or under way."""


class Refused(msgspec.Struct, tag_field="answer", tag="REFUSED"):
    """It is not done; why."""

    reason: str


class Pong(msgspec.Struct, tag_field="answer", tag="PONG"):
    """I am. step_counter: steps begun; step_age: seconds for which the present step has run, 0 between steps."""

    step_counter: int
    step_age: float


class ClientStatus(msgspec.Struct):
    """A client as the engine knows it. unfinished: its requests in the engine."""

    client_index: int
    pid: int
    unfinished: int


class EngineStatus(msgspec.Struct, tag_field="answer", tag="STATUS", kw_only=True):
    """state: starting | running | stopping. stage: where the load is. uptime: seconds. memory: bytes, resident.

    running, waiting: requests. log: path of the log file. engine_args: what it was asked to be, {} until it knows.
    keep_alive: seconds for which it stays without an owner, None if it ends with it. lease_left: seconds until it ends;
    None while owner_pid lives.
    """

    pid: int
    owner_pid: int
    model: str
    state: str
    stage: Progress | None
    uptime: float
    memory: int
    running: int
    waiting: int
    step_counter: int
    step_age: float
    clients: list[ClientStatus]
    log: str
    engine_args: dict[str, Any] = {}
    keep_alive: float | None = None
    lease_left: float | None = None


class Attached(msgspec.Struct, tag_field="answer", tag="ATTACHED", omit_defaults=True):
    """You are client `client_index`: stamp your requests with it. The engine registers on your input socket next.

    clock: the engine's time.monotonic() now, seconds.
    """

    client_index: int
    clock: float = 0.0


Question = Ping | Status | Abort | Attach | Detach | KeepAlive | Shutdown
Answer = Pong | EngineStatus | Attached | Done | Refused
