"""ControlClient: asks an engine's control channel, from any thread and any process of the same user."""

import itertools
from typing import Any

import msgspec
import zmq

from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.control import (
    Abort,
    Answer,
    Attach,
    Attached,
    Detach,
    EngineStatus,
    Ping,
    Pong,
    Question,
    Refused,
    Shutdown,
    Status,
)
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["STUCK_AFTER", "ControlClient", "EngineStuckError"]

STUCK_AFTER = 5.0
"""Seconds without an answer after which an engine counts as stuck (design D4)."""


class EngineStuckError(EngineDeadError):
    """The engine's process is there, and not even its control channel answers (stopped, or the machine swaps)."""


class ControlClient:
    """Questions to the engine at `address`. Each has a socket of its own: threads share none. Use `with`.

    A method waits at most `timeout` seconds for its answer, then raises EngineStuckError; InvalidRequestError if the
    engine refuses, with its reason.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._ctx = zmq.Context()
        self._numbers = itertools.count(1)
        self._decoder = msgspec.msgpack.Decoder(Answer)

    def ping(self, timeout: float = STUCK_AFTER) -> Pong:
        return self._ask(Ping(), Pong, timeout)

    def status(self, timeout: float = STUCK_AFTER) -> EngineStatus:
        return self._ask(Status(), EngineStatus, timeout)

    def abort(self, request_ids: list[str], timeout: float = STUCK_AFTER) -> None:
        self._ask(Abort(request_ids), None, timeout)

    def attach(self, client: Attach, timeout: float = STUCK_AFTER) -> int:
        """The index of the new client."""
        return self._ask(client, Attached, timeout).client_index

    def detach(self, client_index: int, timeout: float = STUCK_AFTER) -> None:
        self._ask(Detach(client_index), None, timeout)

    def shutdown(self, timeout: float = STUCK_AFTER) -> None:
        self._ask(Shutdown(), None, timeout)

    def close(self) -> None:
        self._ctx.destroy(linger=0)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Question, kind: type[Any] | None, timeout: float) -> Any:
        number = next(self._numbers).to_bytes(8, "little")
        with make_zmq_socket(self._ctx, self.address, zmq.DEALER, bind=False, linger=0) as socket:
            socket.send_multipart([number, msgspec.msgpack.encode(question)])
            if not socket.poll(round(timeout * 1000)):
                raise EngineStuckError(f"The engine has not answered for {timeout:g} s; end it with `llmkernel stop`.")
            answer = self._decoder.decode(socket.recv_multipart()[1])
        if isinstance(answer, Refused):
            raise InvalidRequestError(answer.reason)
        if kind is not None and not isinstance(answer, kind):
            raise EngineDeadError(f"The engine answered {type(answer).__name__} to {type(question).__name__}.")
        return answer
