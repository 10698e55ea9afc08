"""ControlServer: the thread that answers the control channel, whatever the rest of the engine is doing."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from llmkernel.engine.ownership import STARTER, Ownership
from llmkernel.engine.peer_watch import PeerWatch
from llmkernel.logger import init_logger
from llmkernel.protocol.control import (
    Abort,
    Answer,
    Attach,
    Attached,
    Detach,
    Done,
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
from llmkernel.protocol.transport import bound_address, make_zmq_socket

__all__ = ["ControlDoor", "ControlServer"]

logger = init_logger(__name__)


class ControlDoor(Protocol):
    """What the engine lets the control channel do. Called on its thread: quick, and safe beside the busy loop."""

    def pong(self) -> Pong: ...

    def status(self) -> EngineStatus: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def attach(self, client: Attach) -> int:
        """The new client's index; ValueError with the reason where it cannot be."""

    def detach(self, client_index: int) -> None:
        """ValueError if there is no such attached client."""

    def starter_is_gone(self) -> None:
        """The process that started an engine that is kept alive has ended."""

    def keep_alive(self, seconds: float) -> None:
        """How long to stay without an owner; ValueError if the engine ends with its owner."""

    def shutdown(self) -> None:
        """End the engine; may not return."""


class ControlServer:
    """Owns a ROUTER bound to `address` and its thread. Start it before anything heavy is imported; `close` ends both.

    Bytes that are no question are logged and dropped; a question that cannot be met is refused with its reason. The
    processes of attached clients are watched, and a client whose process has ended is detached.

    The owner of an engine that is kept alive is watched, too, and the engine ended when its lease is over.

    key: of the run, where its sockets are tcp. address: where it is bound.
    """

    def __init__(self, address: str, door: ControlDoor, ownership: Ownership, key: CurveKey | None = None) -> None:
        self._door = door
        self._ownership = ownership
        self._ctx = zmq.Context()
        self._socket = make_zmq_socket(self._ctx, address, zmq.ROUTER, linger=1000, router_mandatory=False, key=key)
        self.address = bound_address(self._socket)
        self._end = make_zmq_socket(self._ctx, "inproc://end", zmq.PAIR)
        self._thread = threading.Thread(target=self._serve, name="llmkernel-control", daemon=True)
        self._decoder = msgspec.msgpack.Decoder(Question)
        self._poller = zmq.Poller()
        self._peers = PeerWatch()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Answer what has been asked, then end. Once, from any thread but its own; after a Shutdown it has ended."""
        if self._ctx.closed:
            return
        with make_zmq_socket(self._ctx, "inproc://end", zmq.PAIR, bind=False) as end:
            end.send(b"")
            self._thread.join()
        self._ctx.term()

    def _serve(self) -> None:
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._end, zmq.POLLIN)
        with self._socket, self._end, contextlib.closing(self._peers):
            if self._ownership.keep_alive is not None:
                self._watch_starter(self._ownership.pid)
            leave: Callable[[], None] | None = None
            while leave is None:
                ready = dict(self._poller.poll(self._patience_ms))
                for client_index in self._peers.gone(ready):
                    self._part_from(client_index)
                if self._ownership.lease_left == 0:
                    logger.warning("The lease is over, and no owner has come; the engine ends.")
                    leave = self._door.shutdown
                elif self._socket in ready:
                    leave = self._answer(self._socket.recv_multipart())
                elif self._end in ready:
                    return
        self._ctx.term()  # the answer leaves before the process does
        leave()

    @property
    def _patience_ms(self) -> int | None:
        """How long a poll may take at most; None = something will wake it."""
        left = self._ownership.lease_left
        waits = (self._peers.poll_ms, None if left is None else math.ceil(left * 1000))
        return min((wait for wait in waits if wait is not None), default=None)

    def _watch_starter(self, pid: int) -> None:
        try:
            self._peers.add(STARTER, pid, self._poller)
        except ProcessLookupError:
            self._door.starter_is_gone()
            return
        if os.getppid() != pid:  # it had ended before, and the pid is another's by now
            self._part_from(STARTER)

    def _part_from(self, client_index: int) -> None:
        """Its process is gone."""
        logger.warning("The process of client %d is gone; it is detached.", client_index)
        if client_index == STARTER:
            self._peers.discard(client_index, self._poller)
            self._door.starter_is_gone()
        else:
            self._detach(client_index)

    def _answer(self, frames: list[bytes]) -> Callable[[], None] | None:
        """Answer a question; what ends the engine, if that is what was asked."""
        if len(frames) != 3:
            logger.warning("Ignored %d frames on the control channel.", len(frames))
            return None
        peer, number, payload = frames
        try:
            question = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("Ignored a malformed question on the control channel: %s", error)
            return None
        afterwards = None
        try:
            answer, afterwards = self._meet(question)
        except ValueError as error:
            answer = Refused(str(error))
        self._socket.send_multipart([peer, number, msgspec.msgpack.encode(answer)])
        return afterwards

    def _meet(self, question: Question) -> tuple[Answer, Callable[[], None] | None]:
        """The answer, and what follows once it is sent."""
        match question:
            case Ping():
                return self._door.pong(), None
            case Status():
                return self._door.status(), None
            case Abort(request_ids=ids):
                self._door.abort(ids)
            case Attach():
                return Attached(self._attach(question), time.monotonic()), None
            case Detach(client_index=index):
                self._detach(index)
            case KeepAlive(seconds=seconds):
                self._door.keep_alive(seconds)
            case Shutdown():
                return Done(), self._door.shutdown
        return Done(), None

    def _attach(self, client: Attach) -> int:
        client_index = self._door.attach(client)
        try:
            self._peers.add(client_index, client.pid, self._poller)
        except ProcessLookupError:
            self._door.detach(client_index)
            raise ValueError(f"pid = {client.pid}: there is no such process.") from None
        return client_index

    def _detach(self, client_index: int) -> None:
        self._peers.discard(client_index, self._poller)
        self._door.detach(client_index)
