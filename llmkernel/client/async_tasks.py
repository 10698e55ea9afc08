"""The tasks of an AsyncMPClient. They hold its state, never the client itself, so that it can be collected."""

import asyncio
import dataclasses
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zmq

from llmkernel.client.async_control import ask
from llmkernel.client.attachment import Attachment
from llmkernel.client.client_state import DRAIN_MS, EXIT_WAIT, ClientState, Ended
from llmkernel.client.output_receiver import QUEUE_LIMIT, OutputReceiver
from llmkernel.client.resources import BackgroundResources
from llmkernel.client.startup import Startup, StartupState
from llmkernel.client.utility_calls import UtilityCalls
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.logger import init_logger
from llmkernel.protocol.control import Attached
from llmkernel.protocol.output_backlog import OutputBacklog
from llmkernel.protocol.outputs import EngineCoreOutputs, UtilityOutput
from llmkernel.protocol.serial import MsgpackDecoder

__all__ = ["AsyncState", "OutputHooks", "run_output_task", "run_startup_task"]

logger = init_logger(__name__)

YIELD_ABOVE = 4
"""Messages in the outputs queue from which the reader lets its consumer run first."""


class MergingQueue(asyncio.Queue[EngineCoreOutputs | Exception]):
    """An asyncio.Queue that merges outputs per request when its reader is slow."""

    def _init(self, maxsize: int) -> None:
        self._queue: Any = OutputBacklog(QUEUE_LIMIT)


class AsyncState(ClientState[MergingQueue]):
    """What the tasks of one client work on.

    ended: done when the process has ended or the client is closed.
    """

    def __init__(
        self,
        resources: BackgroundResources,
        startup: Startup,
        decoder: MsgpackDecoder,
        utility_results: UtilityCalls,
    ) -> None:
        super().__init__(resources, startup, decoder, utility_results, MergingQueue())
        self.ended: asyncio.Future[None] | None = None
        resources.on_exit = self._on_exit
        resources.on_release = self._on_release

    def bind_loop(self) -> None:
        """Take the running loop as the client's own, if it has none yet."""
        if self.ended is None:
            self.resources.loop = asyncio.get_running_loop()
            self.ended = self.resources.loop.create_future()
            if self.resources.process_exited:
                self.ended.set_result(None)

    async def conclude_when_exited(self) -> None:
        """The engine is dead: fail everybody who waits, with its exit code if that comes soon."""
        if self.ended is not None and self.resources.process is not None:
            await asyncio.wait([self.ended], timeout=EXIT_WAIT)
        self.conclude()

    def _on_exit(self) -> None:
        """Monitor thread: the process ended by itself."""
        loop = self.resources.loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._process_ended)
        except RuntimeError:  # that loop is closed: nobody waits there
            self.resources.record_death()

    def _process_ended(self) -> None:
        self._end()
        reader = self.resources.tasks.get("outputs")
        if reader is None or reader.done():
            self.conclude()
        elif not self.resources.engine_dead:
            reader.cancel()  # it takes what is left to read, then fails the waiters

    def _on_release(self) -> None:
        """The client is being closed; on the loop, or where no loop turns."""
        loop = self.resources.loop
        if not self.startup.over:
            self.startup.fail(by_owner=True)
        if loop is None or loop.is_closed():
            return
        self._end()
        self.conclude()

    def _end(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


async def run_startup_task(state: AsyncState) -> None:
    """Pump the handshake, or attach; then take the registration. Never raises: the outcome is in `state.startup`."""
    startup, resources = state.startup, state.resources
    try:
        if resources.attachment is not None:
            await _attach(state, resources.attachment)
        while startup.needs_handshake:
            reply = startup.handshake_message(await _receive(state, resources.handshake_socket))
            if reply is not None:
                await _reply(resources.handshake_socket, reply)
        while startup.state is StartupState.STARTED:
            startup.registration_message(await _receive(state, resources.input_socket))
        if startup.state is StartupState.FAILED and state.ended is not None:
            await asyncio.wait([state.ended], timeout=EXIT_WAIT)
    except Ended:
        pass
    except asyncio.CancelledError:
        if not resources.closing:  # closing a socket cancels who reads it: no reason to cancel who waits for us
            raise
    if not startup.done:
        resources.engine_dead = True
        if not startup.given_up:
            startup.fail()
    if not resources.closing:
        resources.close_handshake()


async def _attach(state: AsyncState, attachment: Attachment) -> None:
    """Ask the engine for a place; Ended if there is none, with the reason in `attachment.failure`."""
    assert state.ended is not None
    engine = attachment.engine
    address = (
        engine.control_address if attachment.key is None else await asyncio.to_thread(lambda: engine.control_address)
    )
    asked = time.monotonic()
    question = ask(address, attachment.question(), Attached, key=attachment.key)
    asking = asyncio.ensure_future(question)
    try:
        await asyncio.wait([asking, state.ended], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise Ended
        answer: Attached = asking.result()
        attachment.client_index = answer.client_index
        state.startup.clock.told(asked, answer.clock)
        state.startup.clock.heard(answer.clock, time.monotonic())
    except (EngineDeadError, InvalidRequestError) as error:
        attachment.failure = str(error)
        raise Ended from error
    finally:
        asking.cancel()


async def _receive(state: AsyncState, socket: Any) -> Sequence[Any]:
    """The next message of `socket`; Ended when the process is gone and left nothing there, or the client is closed."""
    assert state.ended is not None
    if state.resources.closing:  # by a progress callback
        raise Ended
    receiving = asyncio.ensure_future(socket.recv_multipart())
    try:
        await asyncio.wait([receiving, state.ended], return_when=asyncio.FIRST_COMPLETED)
        if state.resources.closing:
            raise Ended
        if receiving.done():
            return receiving.result()
    finally:
        receiving.cancel()
    if not await socket.poll(DRAIN_MS):
        raise Ended
    return await socket.recv_multipart()


async def _reply(socket: Any, frames: list[bytes]) -> None:
    try:
        await socket.send_multipart(frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:  # it said HELLO and died
            raise


Hook = Callable[[Any, Any], Awaitable[None]]


@dataclasses.dataclass
class OutputHooks:
    """What a subclass adds to the reader, looked up on the class; called while the client lives."""

    client: "weakref.ref[Any]"
    output_handler: Hook | None
    notification_callback_handler: Hook | None
    running: "set[asyncio.Task[None]]" = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, client: Any) -> "OutputHooks":
        kind = type(client)
        return cls(
            weakref.ref(client),
            getattr(kind, "process_engine_outputs", None),
            getattr(kind, "eep_process_engine_core_notification", None),
        )

    def notify(self, output: UtilityOutput) -> None:
        """Start the notification callback of an elastic rank change: (type, data-parallel rank)."""
        data = None if output.result is None else output.result.result
        client = self.client()
        if data is None or client is None or self.notification_callback_handler is None:
            return
        if not isinstance(data, Sequence) or isinstance(data, str) or len(data) != 2:
            logger.error("Ignored a notification that is not a pair (type, rank): %r", data)
            return
        task: asyncio.Task[None] = asyncio.ensure_future(_call(self.notification_callback_handler, client, data))
        self.running.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self.running.discard)


async def _call(handler: Hook, client: Any, data: Any) -> None:
    try:
        await handler(client, data)
    except Exception:  # a one-sided event: there is nobody to raise it to
        logger.exception("The handler of an engine's notification failed.")


async def run_output_task(state: AsyncState, hooks: OutputHooks) -> None:
    """Read the output socket for ever: settle utility calls, queue the outputs. Ends when the engine does."""
    resources, queue = state.resources, state.outputs_queue
    receiver = OutputReceiver(resources, state.decoder, state.utility_results, hooks.notify)
    socket = resources.output_socket
    receiving: asyncio.Future[Sequence[Any]] | None = None
    try:
        while True:
            receiving = socket.recv_multipart(copy=False)
            outputs = receiver.receive(await receiving)
            receiving = None
            if outputs is not None and not await _deliver(outputs, queue, hooks):
                return
            if queue.qsize() > YIELD_ABOVE:
                await asyncio.sleep(0)  # a socket that is never empty would keep the loop to itself
    except asyncio.CancelledError:
        if resources.closing or not resources.process_exited:
            queue.put_nowait(EngineDeadError("The client's output task was cancelled; its loop is ending."))
            return
        await _drain(socket, receiving, receiver, queue, hooks)
        state.conclude()
    except EngineDeadError:
        await state.conclude_when_exited()
    except Exception as error:  # noqa: BLE001 - the consumer must see it rather than wait for ever
        queue.put_nowait(error)


async def _deliver(outputs: EngineCoreOutputs, queue: MergingQueue, hooks: OutputHooks) -> bool:
    """Hand outputs to the hook and to the queue; False when the client that the hook belongs to is gone."""
    if hooks.output_handler is not None:
        client = hooks.client()
        if client is None:
            return False
        await hooks.output_handler(client, outputs)
    if outputs.outputs or outputs.scheduler_stats:
        queue.put_nowait(outputs)
    return True


async def _drain(
    socket: Any,
    receiving: "asyncio.Future[Sequence[Any]] | None",
    receiver: OutputReceiver,
    queue: MergingQueue,
    hooks: OutputHooks,
) -> None:
    """Take what a dead process left in the socket; before that, what the reader had out of it when it was cancelled."""
    taken = receiving is not None and receiving.done() and not receiving.cancelled()
    try:
        while taken or await socket.poll(DRAIN_MS):
            frames = receiving.result() if taken and receiving else await socket.recv_multipart(copy=False)
            taken = False
            outputs = receiver.receive(frames)
            if outputs is not None:
                await _deliver(outputs, queue, hooks)
    except EngineDeadError:
        pass  # its last word
