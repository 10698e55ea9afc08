"""The engine's output thread: encodes outputs and pushes them to the clients, and never waits for a slow one."""

import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from llmkernel.logger import init_logger
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.output_backlog import OutputBacklog
from llmkernel.protocol.outputs import (
    ENGINE_CORE_DEAD,
    ENGINE_FAULT_CALL_ID,
    EngineCoreOutputs,
    UtilityFailure,
    UtilityOutput,
)
from llmkernel.protocol.pending import PendingMessages, track_frames
from llmkernel.protocol.serial import MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["OUTPUT_HWM", "OutputSender"]

logger = init_logger(__name__)

OUTPUT_HWM = 64
"""Messages that may wait in an output socket; what comes then is merged here (design D9)."""

LINGER_MS = 4000
"""How long the last words of a dying engine (ENGINE_CORE_DEAD) may take."""


class OutputSender:
    """Owns the output thread and its PUSH sockets, one per client. Its methods may be called from any thread.

    A client whose socket is full has a lane where its outputs are merged per request until the socket takes more, so
    the engine never blocks and holds no more than what it generated. Messages are encoded into reused bytearrays, which
    are free again when the tracker of their own frame is done.
    """

    def __init__(
        self,
        output_paths: Sequence[str],
        engine_index: int = 0,
        coord_output_path: str | None = None,
        key: CurveKey | None = None,
    ) -> None:
        self._key = key
        self.output_queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._parked = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(
            target=self.process_output_sockets,
            args=(list(output_paths), coord_output_path, engine_index),
            name="llmkernel-output",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def put(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Send `outputs` to the client; -1 is the data-parallel coordinator."""
        self._enqueue((client_index, outputs))

    def attach(self, client_index: int, address: str) -> None:
        """One more client; what is put for it from now on goes to `address`."""
        self._enqueue(_Attach(client_index, address))

    def detach(self, client_index: int) -> None:
        """The client is gone: what it has not taken is dropped."""
        self._enqueue(_Detach(client_index))

    def send_dead(self, fault: UtilityFailure | None, timeout: float = 5.0) -> None:
        """Tell every client that the engine is dead, and why; waits at most `timeout` seconds for the thread to end."""
        self._enqueue(_Dead(fault))
        self._thread.join(timeout)

    def _enqueue(self, item: "_Item") -> None:
        self.output_queue.put(item)
        if self._parked:
            with contextlib.suppress(BlockingIOError):  # enough wake-ups wait already
                self._wake_writer.send(b"\0")

    def process_output_sockets(
        self, output_paths: Sequence[str], coord_output_path: str | None, engine_index: int
    ) -> None:
        """The thread: take outputs from the queue, stamp, encode, push; until ENGINE_CORE_DEAD is said."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._wake_reader)
            stack.enter_context(self._wake_writer)
            ctx = stack.enter_context(zmq.Context())
            sockets = [
                stack.enter_context(
                    make_zmq_socket(ctx, path, zmq.PUSH, bind=False, linger=LINGER_MS, hwm=OUTPUT_HWM, key=self._key)
                )
                for path in output_paths
            ]
            lanes = {index: _Lane(push) for index, push in enumerate(sockets)}
            if coord_output_path is not None:
                coordinator = make_zmq_socket(
                    ctx, coord_output_path, zmq.PUSH, bind=False, linger=LINGER_MS, key=self._key
                )
                lanes[-1] = _Lane(stack.enter_context(coordinator))
            writer = _Writer(max_reuse_bufs=len(sockets) + 1)
            gone: set[int] = set()
            while True:
                item = self._next_item(lanes, writer)
                if isinstance(item, _Dead):
                    _say_dead(lanes, writer, item, engine_index)
                    return
                if isinstance(item, _Attach):
                    push = make_zmq_socket(
                        ctx, item.address, zmq.PUSH, bind=False, linger=LINGER_MS, hwm=OUTPUT_HWM, key=self._key
                    )
                    lanes[item.client_index] = _Lane(stack.enter_context(push))
                elif isinstance(item, _Detach):
                    lanes.pop(item.client_index).socket.close(linger=0)
                    gone.add(item.client_index)
                elif item[0] not in gone:  # else this is the end of what it had asked
                    _send(lanes, writer, *item, engine_index)

    def _next_item(self, lanes: "dict[int, _Lane]", writer: "_Writer") -> "_Item":
        """The next thing to send; meanwhile lanes that were full are emptied as their sockets take more."""
        while True:
            full = [lane for lane in lanes.values() if lane.backlog]
            if not full:
                return self.output_queue.get()
            self._parked = True  # before looking: whoever puts after this look wakes us
            try:
                with contextlib.suppress(queue.Empty):
                    return self.output_queue.get_nowait()
                poller = zmq.Poller()
                poller.register(self._wake_reader, zmq.POLLIN)
                for lane in full:
                    poller.register(lane.socket, zmq.POLLOUT)
                ready = dict(poller.poll())
            finally:
                self._parked = False
            if self._wake_reader.fileno() in ready:
                self._wake_reader.recv(4096)
            for lane in full:
                lane.flush(writer)


@dataclasses.dataclass(frozen=True)
class _Dead:
    """In the queue: say farewell, then end the thread."""

    fault: UtilityFailure | None


@dataclasses.dataclass(frozen=True)
class _Attach:
    """In the queue: one more client."""

    client_index: int
    address: str


@dataclasses.dataclass(frozen=True)
class _Detach:
    """In the queue: a client is gone."""

    client_index: int


_Item = tuple[int, EngineCoreOutputs] | _Dead | _Attach | _Detach


class _Lane:
    """One client: its socket and what waits for it."""

    def __init__(self, push: Any) -> None:
        self.socket = push
        self.backlog = OutputBacklog()

    def flush(self, writer: "_Writer") -> bool:
        """Send what the socket takes; says whether nothing is left."""
        while self.backlog:
            if not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                return False
            writer.send(self.socket, self.backlog.popleft())
        return True


class _Writer:
    """Encodes and sends; keeps what ZMQ may still read, and reuses the buffers that it has let go of."""

    def __init__(self, max_reuse_bufs: int) -> None:
        self._encoder = MsgpackEncoder()
        self._max_reuse_bufs = max_reuse_bufs
        self.reuse_buffers: list[bytearray] = []
        self.pending = PendingMessages()

    def send(self, push: Any, outputs: EngineCoreOutputs) -> None:
        for _, buffer in self.pending.reclaim():
            if len(self.reuse_buffers) < self._max_reuse_bufs:
                self.reuse_buffers.append(buffer)
        buffer = self.reuse_buffers.pop() if self.reuse_buffers else bytearray()
        outputs.pushed = time.monotonic()
        encoded = self._encode(outputs, buffer)
        if len(encoded) == 1 and len(buffer) < zmq.COPY_THRESHOLD:  # it is copied anyway, and free again at once
            push.send(buffer, zmq.DONTWAIT)
            self.reuse_buffers.append(buffer)
            return
        frames, tracker = track_frames(encoded)
        push.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        self.pending.add(tracker, outputs, buffer)

    def _encode(self, outputs: EngineCoreOutputs, buffer: bytearray) -> list[Any]:
        try:
            return self._encoder.encode_into(outputs, buffer)
        except TypeError as error:
            if outputs.utility_output is None:
                raise
            call_id = outputs.utility_output.call_id
            failure = UtilityFailure(type(error).__name__, f"The result does not travel: {error}", "")
            outputs.utility_output = UtilityOutput(call_id, failure=failure)
            return self._encoder.encode_into(outputs, buffer)


def _send(
    lanes: "dict[int, _Lane]", writer: _Writer, client_index: int, outputs: EngineCoreOutputs, engine_index: int
) -> None:
    lane = lanes.get(client_index)
    if lane is not None:
        outputs.engine_index = engine_index
        lane.backlog.append(outputs)
        lane.flush(writer)
    else:
        logger.error("Dropped outputs for client %d, which does not exist.", client_index)


def _say_dead(lanes: "dict[int, _Lane]", writer: _Writer, dead: _Dead, engine_index: int) -> None:
    """What waits, the reason, ENGINE_CORE_DEAD: to every client, slow ones within the linger time of all together."""
    deadline = time.monotonic() + LINGER_MS / 1000
    for lane in lanes.values():
        if dead.fault is not None:
            notice = UtilityOutput(ENGINE_FAULT_CALL_ID, failure=dead.fault)
            lane.backlog.append(EngineCoreOutputs(engine_index=engine_index, utility_output=notice))
    waiting = list(lanes.values())
    while waiting:
        waiting = [lane for lane in waiting if not (lane.flush(writer) and _send_last_frame(lane.socket))]
        remaining = deadline - time.monotonic()
        if not waiting or remaining <= 0:
            return
        poller = zmq.Poller()
        for lane in waiting:
            poller.register(lane.socket, zmq.POLLOUT)
        poller.poll(int(remaining * 1000) + 1)


def _send_last_frame(push: Any) -> bool:
    try:
        push.send(ENGINE_CORE_DEAD, zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True
