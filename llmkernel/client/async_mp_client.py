"""AsyncMPClient: the client on an event loop. Send, receive, decode and dispatch are coroutines of that one loop."""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import zmq

from llmkernel.client.async_tasks import AsyncState, OutputHooks, run_output_task, run_startup_task
from llmkernel.client.attachment import RunningEngine
from llmkernel.client.background_task import background_task
from llmkernel.client.keep_alive import KeepAlive
from llmkernel.client.mp_client import MPClient
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, WrongLoopError
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.pending import track_frames
from llmkernel.protocol.requests import EngineCoreRequest, EngineCoreRequestType, EngineIdentity

__all__ = ["AsyncMPClient"]


class AsyncMPClient(MPClient):
    """The client of one event loop (design D1). It may be built anywhere; the loop that first uses it is its loop.

    Two tasks on that loop, `llmkernel-startup` and `llmkernel-outputs`, hold the sockets and registries but not the
    client: when nobody holds the client any more, its finaliser ends them, the engine, and everything else.

    A subclass may define two hooks, both called with the client while it lives: `async process_engine_outputs(client,
    outputs)` for every message with outputs, and `async eep_process_engine_core_notification(client, (type, dp_rank))`.
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
        keep: KeepAlive | None = None,
    ) -> None:
        super().__init__(
            True, args, executor_class, log_stats, client_addresses, client_index, client_count, engine, keep
        )
        self._state = AsyncState(self.resources, self.startup, self.decoder, self.utility_results)
        self.outputs_queue = self._state.outputs_queue
        with contextlib.suppress(RuntimeError):  # no loop runs: the first use starts the tasks
            asyncio.get_running_loop()
            self._ensure_tasks()

    async def ready(self) -> EngineCoreReadyResponse:
        """Wait until the engine takes requests. EngineStartupError says why it does not, and everything is given back.

        Cancelling the wait does not end the load; `shutdown` does.
        """
        self._ensure_tasks()
        if not self.startup.over:
            await asyncio.shield(self.resources.tasks["startup"])
        if not self.startup.done:
            error = self.startup_error()
            self.shutdown()
            raise error
        assert self.startup.response is not None
        return self.startup.response

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs of the engine; raises what ended it."""
        if self.startup.done:
            self._check_loop()
            self._ensure_output_queue_task()
        else:
            await self.ready()
        if self._state.concluded and self.outputs_queue.empty():
            raise self.resources.dead_error()
        item = await self.outputs_queue.get()  # what came before the engine's end comes before the error
        if isinstance(item, Exception):
            raise self._format_exception(item) from None
        return item

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs come from `get_output_async`."""
        await self._ensure_ready()
        request.client_index = self.client_index
        await self._deliver(EngineCoreRequestType.ADD, request)
        self._ensure_output_queue_task()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; nothing to do for none, or when it is dead."""
        if request_ids and not self.resources.engine_dead:
            with contextlib.suppress(EngineDeadError):
                await self._ensure_ready()
                await self._deliver(EngineCoreRequestType.ABORT, list(request_ids))

    def abort_requests_soon(self, request_ids: Iterable[str]) -> None:
        """As `abort_requests_async` from sync code in the loop's thread (a finaliser, an interrupt): no wait, no error.

        The loop may be standing still (terminal IPython, between cells).
        """
        ids, resources = list(request_ids), self.resources
        if not ids or not self.startup.done or resources.engine_dead or resources.process_exited:
            return
        if resources.loop is not None and resources.loop.is_running():
            self._check_loop()
            sent = self._send_input(EngineCoreRequestType.ABORT, ids)
            sent.add_done_callback(lambda future: future.cancelled() or future.exception())
        else:
            message = (self.core_engine, *self._encode(EngineCoreRequestType.ABORT, ids))
            with contextlib.suppress(zmq.ZMQError):  # nobody else sends now, and this socket never waits
                zmq.Socket.shadow(self.input_socket.underlying).send_multipart(message, zmq.DONTWAIT)

    def leave(self, request_ids: Iterable[str]) -> None:
        """The loop is about to end: requests are aborted; an engine that we share is left, one that we own goes on."""
        if self.resources.attachment is not None:
            self.shutdown()
        else:
            self.abort_requests_soon(request_ids)

    async def call_utility_async(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - the same option as the sync client's
    ) -> Any:
        """Call a utility of the engine by name, between two of its steps; returns its result.

        timeout: seconds (TimeoutError; the call may still run). UtilityCallError carries what the engine raised.
        """
        async with asyncio.timeout(timeout):
            return await self._call_utility_async(method, *args, engine=self.core_engine)

    async def _call_utility_async(self, method: str, *args: Any, engine: EngineIdentity) -> Any:
        await self._ensure_ready()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call_id = self.utility_results.open(method, future)
        try:
            call = (self.client_index, call_id, method, args)
            await self._deliver(EngineCoreRequestType.UTILITY, call, engine)
            self._ensure_output_queue_task()
            return await future
        finally:
            self.utility_results.discard(call_id)

    async def _deliver(
        self, request_type: EngineCoreRequestType, request: Any, engine: EngineIdentity | None = None
    ) -> None:
        """`_send_input`, and an engine that cannot be reached is a dead one."""
        try:
            await self._send_input(request_type, request, engine)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            await self._state.conclude_when_exited()
            raise self.resources.dead_error() from None

    def _send_input(
        self, request_type: EngineCoreRequestType, request: Any, engine: EngineIdentity | None = None
    ) -> "asyncio.Future[Any]":
        """Send a message; await the result for it to be out."""
        return self._send_input_message(self._encode(request_type, request), engine or self.core_engine, request)

    def _send_input_message(
        self, message: tuple[Any, ...], engine: EngineIdentity, objects: Any
    ) -> "asyncio.Future[Any]":
        """Address `message` to `engine`. What its aux frames point into stays alive until ZMQ has let go of it."""
        self.pending_messages.reclaim()
        msg = (engine, *message)
        if len(msg) <= 3:  # identity, type, payload: no aux buffers
            return self.input_socket.send_multipart(msg, copy=False)
        frames, tracker = track_frames(msg[3:])

        def add_pending(_: "asyncio.Future[Any]") -> None:
            pending_messages.add(tracker, objects)

        pending_messages = self.pending_messages
        future = self.input_socket.send_multipart([*msg[:3], *frames], copy=False)
        future.add_done_callback(add_pending)
        return future

    def _format_exception(self, error: Exception) -> Exception:
        """What to raise for an exception from the outputs queue: once the engine is dead, that is the news."""
        return self.resources.dead_error() if self.resources.engine_dead else error

    async def _ensure_ready(self) -> None:
        if self.startup.done:
            self._check_loop()
            self.ensure_alive()
            self._ensure_output_queue_task()
        else:
            await self.ready()

    def _ensure_tasks(self) -> None:
        self._check_loop()
        if not self.startup.over:
            self._state.bind_loop()
            if "startup" not in self.resources.tasks:
                self.resources.tasks["startup"] = background_task(run_startup_task(self._state), "llmkernel-startup")
        self._ensure_output_queue_task()

    def _ensure_output_queue_task(self) -> None:
        """Start the task that reads the output socket, once. It holds no reference to this client."""
        if "outputs" in self.resources.tasks or self.resources.closing:
            return
        self._state.bind_loop()
        hooks = OutputHooks.of(self)
        self.resources.tasks["outputs"] = background_task(run_output_task(self._state, hooks), "llmkernel-outputs")

    def _check_loop(self) -> None:
        """One loop per client: messages would be split between two (jupyter.md section 9)."""
        if os.getpid() != self.resources.owner_pid:
            self.ensure_alive()
        loop = self.resources.loop
        if loop is not None and loop is not asyncio.get_running_loop():
            raise WrongLoopError(
                "An AsyncMPClient lives on one event loop, the one that first used it; this is another one. "
                "Use the engine from its own loop, or load one for this loop."
            )
