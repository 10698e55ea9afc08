"""EngineCoreProc: EngineCore with sockets. An input thread, the busy loop in the main thread, an output thread."""

import contextlib
import queue
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from llmkernel.engine.core import EngineCore
from llmkernel.engine.input_decoder import InputDecoder, RefusedRequest, bare_request
from llmkernel.engine.input_sockets import InputSockets
from llmkernel.engine.output_sender import OutputSender
from llmkernel.errors import LLMKernelError
from llmkernel.logger import init_logger
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.handshake import EngineAddresses
from llmkernel.protocol.outputs import EngineCoreOutputs, UtilityFailure, UtilityOutput, UtilityResult
from llmkernel.protocol.requests import EngineCoreRequestType, EngineIdentity, engine_identity

__all__ = ["EngineCoreProc"]

logger = init_logger(__name__)

IO_START_TIMEOUT = 10.0
"""Seconds that the input thread may take to connect."""

MESSAGE_PACE = 0.01
"""Seconds after a message for which further tokens of running requests wait, to travel together. No screen shows them
sooner (60 pictures a second), and a message costs half a millisecond of processor time on its way to its reader, which
a step on all processors of a small machine stands still for.
"""

FAREWELL_TIMEOUT = 0.5
"""Seconds for the last words when somebody asked us to leave and waits; an owner in a hurry ends us sooner."""


class EngineCoreProc:
    """Owns the threads and queues around `core`. `run` is the life of the engine process after its start-up.

    core: has no sockets and is called from the main thread only, but for `preprocess_add_request`. addresses: one input
    and one output per client, at the client's index. key: of the run, where they are tcp.
    """

    def __init__(
        self, core: EngineCore, addresses: EngineAddresses, engine_index: int = 0, key: CurveKey | None = None
    ) -> None:
        self.core = core
        self.engines_running = False  # data parallel: step even without requests of our own
        self.input_queue: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = queue.SimpleQueue()
        self.output_sender = OutputSender(addresses.outputs, engine_index, addresses.coordinator_output, key)
        core.pace_outputs(MESSAGE_PACE)
        core.on_grammar_compiled = lambda: self.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self.num_owner_clients = len(addresses.inputs)
        self._shutdown_requested = False
        self._input_sockets = InputSockets(msgspec.msgpack.encode(core.ready), self._on_client_gone, key)
        self._input_ready = threading.Event()
        self._input_thread = threading.Thread(
            target=self._run_input_thread,
            args=(addresses.inputs, addresses.coordinator_input, engine_identity(engine_index)),
            name="llmkernel-input",
            daemon=True,
        )

    def start_io_threads(self) -> None:
        """Register with every client and open the outputs. RuntimeError if the input thread does not come up."""
        self._input_thread.start()
        if not self._input_ready.wait(IO_START_TIMEOUT):
            raise RuntimeError("The engine could not connect to its clients; see its log.")
        self.output_sender.start()

    def request_shutdown(self) -> None:
        """Leave between two steps. Safe in a signal handler: SimpleQueue.put is reentrant."""
        self._shutdown_requested = True
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def say_farewell(self) -> None:
        """Tell every client that the engine ends now."""
        self.output_sender.send_dead(None, FAREWELL_TIMEOUT)

    def run(self) -> int:
        """The busy loop, and what follows it: every client hears ENGINE_CORE_DEAD. Returns the exit code."""
        try:
            self.run_busy_loop()
        except Exception as error:  # whatever it is, the clients must hear of it
            logger.exception("The engine died.")
            trace = "".join(traceback.format_exception(error))
            self.output_sender.send_dead(UtilityFailure(type(error).__name__, str(error), trace))
            return 1
        self.say_farewell()
        self.core.shutdown()
        return 0

    # Any thread -------------------------------------------------------------------------------------------------

    def attach_client(self, client_index: int, input_address: str, output_address: str) -> None:
        """One more client: the engine connects to both addresses, and registers at the input."""
        self.output_sender.attach(client_index, output_address)
        self._input_sockets.attach(client_index, input_address)

    def detach_client(self, client_index: int) -> None:
        """That client is gone: its requests end, and its sockets are let go of."""
        self._input_sockets.detach(client_index)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests: after the forward that runs now, and again in order, so that an ADD before it is not missed."""
        self.core.aborts_queue.put(request_ids)
        self.input_queue.put((EngineCoreRequestType.ABORT, request_ids))

    # Main thread ------------------------------------------------------------------------------------------------

    def run_busy_loop(self) -> None:
        """Take what the clients sent, step, push what came of it; until `request_shutdown`."""
        try:
            while not self._shutdown_requested:
                self._process_input_queue()
                if not self._shutdown_requested:
                    self._push(self.core.step())
        finally:
            self._push(self.core.take_outputs())

    def _has_work(self) -> bool:
        return self.engines_running or self.core.has_requests()

    def _process_input_queue(self) -> None:
        """Block until there is work, then take everything that waits; who sent it finds told what came before it."""
        while not self._has_work() and not self._shutdown_requested:
            if self.input_queue.empty():
                logger.debug("EngineCore waiting for work.")
            self._handle_client_request(*self.input_queue.get())
        with contextlib.suppress(queue.Empty):
            while True:
                request = self.input_queue.get_nowait()
                self._push(self.core.take_outputs())
                self._handle_client_request(*request)

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type is EngineCoreRequestType.ADD:
            self._add(request)
        elif request_type is EngineCoreRequestType.ABORT:
            self.core.abort_requests(request)
            self._forget_early_aborts()
        elif request_type is EngineCoreRequestType.UTILITY:
            self._call_utility(*request)
        elif request_type is EngineCoreRequestType.CLIENT_GONE:
            self.core.abort_client_requests(request)
            self.output_sender.detach(request)
        elif request_type is EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError(f"A part of the engine failed: {request}") from request
        elif request_type is EngineCoreRequestType.START_DP_WAVE:
            logger.warning("Ignored START_DP_WAVE: this engine is not data parallel.")

    def _forget_early_aborts(self) -> None:
        """Every one of them comes through the input queue too; a stale one must not meet a later request of that id."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.core.aborts_queue.get_nowait()

    def _add(self, request: Any) -> None:
        if isinstance(request, RefusedRequest):
            self.core.reject_request(request.request, request.reason)
            return
        try:
            self.core.add_request(request)
        except LLMKernelError as error:
            logger.error("Refused request %s: %s", request.request_id, error)
            self.core.reject_request(bare_request(request.request_id, request.client_index), str(error))

    def _push(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_index, message in outputs.items():
            self.output_sender.put(client_index, message)

    def _call_utility(self, client_index: int, call_id: int, method: str, args: Sequence[Any]) -> None:
        """Call it between two steps; the answer may come later, when the method returns a Future."""
        try:
            result = self.core.call_utility(method, args)
        except Exception as error:  # noqa: BLE001 - it is the caller's, with its traceback
            self._answer(client_index, call_id, None, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._answer_future, client_index, call_id))
        else:
            self._answer(client_index, call_id, result, None)

    def _answer_future(self, client_index: int, call_id: int, future: "Future[Any]") -> None:
        error = future.exception()
        self._answer(client_index, call_id, None if error else future.result(), error)

    def _answer(self, client_index: int, call_id: int, result: Any, error: BaseException | None) -> None:
        output = UtilityOutput(call_id)
        if error is None:
            output.result = UtilityResult(result)
        else:
            trace = "".join(traceback.format_exception(error))
            output.failure = UtilityFailure(type(error).__name__, str(error), trace)
        self.output_sender.put(client_index, EngineCoreOutputs(utility_output=output))

    # Input thread -----------------------------------------------------------------------------------------------

    def _run_input_thread(self, *args: Any) -> None:
        try:
            self.process_input_sockets(*args)
        except Exception as error:  # an engine that hears nobody must end, and say so
            logger.exception("The input thread died.")
            self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, error))

    def process_input_sockets(
        self, input_addresses: Sequence[str], coord_input_address: str | None, identity: EngineIdentity
    ) -> None:
        """The thread: register with every client, then poll, receive, decode, enqueue; for ever."""
        sockets = self._input_sockets
        decoder = InputDecoder(self.core.preprocess_add_request, sockets.clients)
        with sockets.opened(input_addresses, coord_input_address, identity):
            self._input_ready.set()
            while True:
                for frames in sockets.receive():
                    self._take(decoder.decode(frames))

    def _take(self, item: tuple[EngineCoreRequestType, Any] | None) -> None:
        if item is None:
            return
        if item[0] is EngineCoreRequestType.ABORT:
            self.abort_requests(item[1])
        else:
            self.input_queue.put_nowait(item)

    def _on_client_gone(self, client_index: int) -> None:
        self.input_queue.put((EngineCoreRequestType.CLIENT_GONE, client_index))
