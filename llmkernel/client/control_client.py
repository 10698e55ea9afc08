"""ControlClient: asks an engine's control channel, from any thread and any process of the same user."""

from collections.abc import Sequence
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
    KeepAlive,
    Ping,
    Pong,
    Question,
    Refused,
    Shutdown,
    Status,
)
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["STUCK_AFTER", "ControlClient", "EngineStuckError", "pack_question", "unpack_answer"]

STUCK_AFTER = 5.0
"""Seconds without an answer after which an engine counts as stuck (design D4)."""


ABORT_LINGER_MS = 1000


class EngineStuckError(EngineDeadError):
    """The engine's process is there, and not even its control channel answers (stopped, or the machine swaps)."""

    @classmethod
    def after(cls, seconds: float) -> "EngineStuckError":
        return cls(f"The engine has not answered for {seconds:g} s; end it with `llmkernel stop`.")


class ControlClient:
    """Questions to the engine at `address`. Each has a socket of its own: threads share none. Use `with`.

    A method waits at most `timeout` seconds for its answer, then raises EngineStuckError; InvalidRequestError if the
    engine refuses, with its reason. key: of the engine's run, where its address is tcp.
    """

    def __init__(self, address: str, key: CurveKey | None = None) -> None:
        self.address = address
        self._key = key
        self._ctx = zmq.Context()

    def ping(self, timeout: float = STUCK_AFTER) -> Pong:
        return self._ask(Ping(), Pong, timeout)

    def status(self, timeout: float = STUCK_AFTER) -> EngineStatus:
        return self._ask(Status(), EngineStatus, timeout)

    def abort(self, request_ids: list[str], timeout: float = STUCK_AFTER) -> None:
        self._ask(Abort(request_ids), None, timeout)

    def abort_soon(self, request_ids: list[str]) -> None:
        """As `abort`, without waiting for the answer: for a thread that must not be held up."""
        with self._connect(ABORT_LINGER_MS) as socket:
            socket.send_multipart(pack_question(Abort(request_ids)))

    def attach(self, client: Attach, timeout: float = STUCK_AFTER) -> Attached:
        """The place of the new client."""
        answer: Attached = self._ask(client, Attached, timeout)
        return answer

    def detach(self, client_index: int, timeout: float = STUCK_AFTER) -> None:
        self._ask(Detach(client_index), None, timeout)

    def keep_alive(self, seconds: float, timeout: float = STUCK_AFTER) -> None:
        self._ask(KeepAlive(seconds), None, timeout)

    def shutdown(self, timeout: float = STUCK_AFTER) -> None:
        self._ask(Shutdown(), None, timeout)

    def close(self) -> None:
        self._ctx.destroy()

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, linger: int) -> "zmq.Socket[bytes]":
        return make_zmq_socket(self._ctx, self.address, zmq.DEALER, bind=False, linger=linger, key=self._key)

    def _ask(self, question: Question, kind: type[Any] | None, timeout: float) -> Any:
        with self._connect(linger=0) as socket:
            socket.send_multipart(pack_question(question))
            if not socket.poll(round(timeout * 1000)):
                raise EngineStuckError.after(timeout)
            return unpack_answer(socket.recv_multipart(), kind)


def pack_question(question: Question) -> list[bytes]:
    """The frames to send on a DEALER of its own."""
    return [b"", msgspec.msgpack.encode(question)]


def unpack_answer(frames: "Sequence[Any]", kind: type[Any] | None) -> Any:
    """The answer in what came back, of type `kind` (None: any). InvalidRequestError if the engine refused."""
    try:
        answer = _decoder.decode(frames[-1])
    except msgspec.DecodeError as error:
        raise EngineDeadError(f"What answers at the engine's address is no engine: {error}.") from error
    if isinstance(answer, Refused):
        raise InvalidRequestError(answer.reason)
    if kind is not None and not isinstance(answer, kind):
        raise EngineDeadError(f"The engine answered {type(answer).__name__} where {kind.__name__} was asked for.")
    return answer


_decoder = msgspec.msgpack.Decoder(Answer)
