"""SyncMPClient: the same wire with blocking calls. A daemon thread reads the output socket."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

from llmkernel.client.attachment import Attachment, RunningEngine
from llmkernel.client.client_state import DRAIN_MS, EXIT_WAIT, ClientState, Ended
from llmkernel.client.mp_client import MPClient
from llmkernel.client.output_receiver import QUEUE_LIMIT, OutputReceiver
from llmkernel.client.resources import BackgroundResources
from llmkernel.client.startup import Startup, StartupState
from llmkernel.client.utility_calls import UtilityCalls
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.logger import init_logger
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.output_backlog import OutputBacklog
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.pending import track_frames
from llmkernel.protocol.requests import EngineCoreRequest, EngineCoreRequestType
from llmkernel.protocol.serial import MsgpackDecoder

__all__ = ["SyncMPClient"]

logger = init_logger(__name__)

SILENCE = 0.5
"""Seconds without a word while a call waits, after which `on_silence` hears of it."""

T = TypeVar("T")


class SyncMPClient(MPClient):
    """The client for blocking code, in any thread and beside any loop. Calls may come from several threads.

    on_silence: called in a call that waits, `ready` too, every SILENCE seconds in which nothing comes; quick.
    """

    def __init__(
        self,
        args: EngineArgs,
        executor_class: str | None = None,
        log_stats: bool = True,
        client_addresses: Mapping[str, str] | None = None,
        client_index: int = 0,
        client_count: int = 1,
        engine: RunningEngine | None = None,
    ) -> None:
        super().__init__(False, args, executor_class, log_stats, client_addresses, client_index, client_count, engine)
        self._state = _SyncState(self.resources, self.startup, self.decoder, self.utility_results)
        self.outputs_queue = self._state.outputs_queue
        self.on_silence: Callable[[], None] = lambda: None
        self._startup_lock = threading.Lock()
        self._send_lock = threading.Lock()

    def ready(self) -> EngineCoreReadyResponse:
        """Wait until the engine takes requests. EngineStartupError says why not, and everything is given back."""
        with self._startup_lock:
            if not self.startup.over:
                self._state.run_startup(lambda: self.on_silence())
        if not self.startup.done:
            error = self.startup_error()
            self.shutdown()
            raise error
        assert self.startup.response is not None
        return self.startup.response

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The next outputs of the engine; raises what ended it. queue.Empty after `timeout` seconds."""
        if not self.startup.done:
            self.ready()
        if self._state.concluded and self.outputs_queue.empty():
            raise self.resources.dead_error()
        item = self._wait(lambda seconds: self.outputs_queue.get(timeout=seconds), timeout)
        if isinstance(item, Exception):
            raise (self.resources.dead_error() if self.resources.engine_dead else item) from None
        return item

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs come from `get_output`."""
        self._ensure_ready()
        request.client_index = self.client_index
        self._send_input(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; nothing to do for none, or when it is dead."""
        if request_ids and self.startup.done and not self.resources.engine_dead:
            try:
                self._send_input(EngineCoreRequestType.ABORT, list(request_ids))
            except EngineDeadError:
                logger.debug("The engine died before it heard of an abort.")

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility of the engine by name, between two of its steps; returns its result.

        timeout: seconds (TimeoutError; the call may still run). UtilityCallError carries what the engine raised.
        """
        self._ensure_ready()
        future: Future[Any] = Future()
        call_id = self.utility_results.open(method, future)
        try:
            self._send_input(EngineCoreRequestType.UTILITY, (self.client_index, call_id, method, args))
            if self._state.concluded:  # it died after we looked and before we were registered
                raise self.resources.dead_error()
            return self._wait(future.result, timeout)
        finally:
            self.utility_results.discard(call_id)

    def _ensure_ready(self) -> None:
        if self.startup.done:
            self.ensure_alive()
        else:
            self.ready()

    def _wait(self, get: Callable[[float], T], timeout: float | None) -> T:
        """`get(seconds)` again and again until it brings something; what it raises when `timeout` seconds are over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SILENCE if deadline is None else max(0.0, min(SILENCE, deadline - time.monotonic()))
            try:
                return get(left)
            except (queue.Empty, TimeoutError):
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                self.on_silence()

    def _send_input(self, request_type: EngineCoreRequestType, request: Any) -> None:
        with self._send_lock:
            self.pending_messages.reclaim()
            msg = (self.core_engine, *self._encode(request_type, request))
            frames, tracker = track_frames(msg[3:])
            try:
                self.input_socket.send_multipart([*msg[:3], *frames], copy=False)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._state.conclude_when_exited()
                raise self.resources.dead_error() from None
            if frames:
                self.pending_messages.add(tracker, request)


class _MergingQueue(queue.Queue[EngineCoreOutputs | Exception]):
    """A queue.Queue that merges outputs per request when its reader is slow."""

    def _init(self, maxsize: int) -> None:
        self.queue: Any = OutputBacklog(QUEUE_LIMIT)


class _SyncState(ClientState[_MergingQueue]):
    """What the output thread works on; holds no reference to the client.

    A byte in the socket pair interrupts whoever polls. It is never read: it means that the process has ended or the
    client is being closed. _pump: held while the start-up uses the sockets.
    """

    def __init__(
        self,
        resources: BackgroundResources,
        startup: Startup,
        decoder: MsgpackDecoder,
        utility_results: UtilityCalls,
    ) -> None:
        super().__init__(resources, startup, decoder, utility_results, _MergingQueue())
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._pump = threading.RLock()
        resources.on_exit = self._on_exit
        resources.on_release = self._on_release
        resources.on_close = self._on_close

    def run_startup(self, on_silence: Callable[[], None]) -> None:
        """Pump the handshake or attach, take the registration, start the output thread. `startup` holds the outcome."""
        with self._pump:
            self._run_startup(self.startup, self.resources, on_silence)

    def _run_startup(self, startup: Startup, resources: BackgroundResources, on_silence: Callable[[], None]) -> None:
        try:
            if resources.attachment is not None:
                self._attach(resources.attachment)
            while startup.needs_handshake:
                reply = startup.handshake_message(self._receive(resources.handshake_socket, on_silence))
                if reply is not None:
                    _reply(resources.handshake_socket, reply)
            while startup.state is StartupState.STARTED:
                startup.registration_message(self._receive(resources.input_socket, on_silence))
        except Ended:
            pass
        if not startup.done:
            if resources.process is not None:
                resources.process.wait(EXIT_WAIT)
            resources.engine_dead = True
            if not startup.given_up:
                startup.fail()
            return
        resources.close_handshake()
        if resources.closing:
            return
        self._thread = threading.Thread(target=self._read_outputs, name="llmkernel-outputs", daemon=True)
        self._thread.start()

    def _attach(self, attachment: Attachment) -> None:
        """Ask the engine for a place; Ended if there is none, with the reason in `attachment.failure`."""
        try:
            with attachment.engine.control() as control:
                asked = time.monotonic()
                answer = control.attach(attachment.question())
            attachment.client_index = answer.client_index
            self.startup.clock.told(asked, answer.clock)
            self.startup.clock.heard(answer.clock, time.monotonic())
        except (EngineDeadError, InvalidRequestError) as error:
            attachment.failure = str(error)
            raise Ended from error

    def conclude_when_exited(self) -> None:
        """The engine is dead: fail everybody who waits, with its exit code if that comes soon."""
        if self.resources.process is not None:
            self.resources.process.wait(EXIT_WAIT)
        self.conclude()

    def _receive(self, source: Any, on_silence: Callable[[], None]) -> Sequence[Any]:
        """The next message of `source`; Ended when the process is gone and has left nothing there, or on shutdown."""
        if self.resources.closing:  # by a progress callback
            raise Ended
        poller = zmq.Poller()
        poller.register(source, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while not (ready := dict(poller.poll(int(SILENCE * 1000)))):
            on_silence()
        if self.resources.closing:
            raise Ended
        if source in ready or source.poll(DRAIN_MS):
            return source.recv_multipart()
        raise Ended

    def _read_outputs(self) -> None:
        """The output thread."""
        receiver = OutputReceiver(self.resources, self.decoder, self.utility_results)
        source = self.resources.output_socket
        poller = zmq.Poller()
        poller.register(source, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        try:
            while not self.resources.closing:
                ready = dict(poller.poll())
                if source in ready or (not self.resources.closing and source.poll(DRAIN_MS)):
                    outputs = receiver.receive(source.recv_multipart(copy=False))
                    if outputs is not None and (outputs.outputs or outputs.scheduler_stats):
                        self.outputs_queue.put(outputs)
                elif not self.resources.closing:
                    self.conclude()
                    return
        except EngineDeadError:
            self.conclude_when_exited()
        except Exception as error:  # noqa: BLE001 - the consumer must see it rather than wait for ever
            self.outputs_queue.put(error)

    def _on_exit(self) -> None:
        """Monitor thread: the process ended by itself."""
        self._wake()

    def _on_release(self) -> None:
        if not self.startup.over:
            self.startup.fail(by_owner=True)
        self.conclude()
        self._wake()

    def _on_close(self) -> None:
        with self._pump:  # whoever waits for the start-up has left the sockets
            pass
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed this very moment
            self._wake_writer.send(b"\0")


def _reply(target: Any, frames: list[bytes]) -> None:
    try:
        target.send_multipart(frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:  # it said HELLO and died
            raise
