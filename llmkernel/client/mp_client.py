"""MPClient: what the sync and the async client share. It starts the engine process and owns the sockets."""

import asyncio
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from llmkernel.client.adopted_process import AdoptedProcess
from llmkernel.client.async_control import ask
from llmkernel.client.attached_process import AttachedProcess
from llmkernel.client.attachment import Attachment, RunningEngine
from llmkernel.client.control_client import STUCK_AFTER, EngineStuckError
from llmkernel.client.engine_core_client import EngineCoreClient
from llmkernel.client.failure import StartupFailure
from llmkernel.client.keep_alive import KeepAlive
from llmkernel.client.process import EngineProcess
from llmkernel.client.resources import BackgroundResources
from llmkernel.client.startup import ProgressCallback, Startup
from llmkernel.client.utility_calls import UtilityCalls
from llmkernel.client.watched_process import WatchedProcess
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.protocol.control import Ping, Pong
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.handshake import EngineAddresses, EngineCoreReadyResponse, EngineHandshakeMetadata, Progress
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.pending import PendingMessages
from llmkernel.protocol.private_file import write_private
from llmkernel.protocol.requests import EngineCoreRequestType, engine_identity
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import RunDirectory, sweep_dead
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder
from llmkernel.protocol.transport import bound_address, make_zmq_socket

__all__ = ["MPClient"]

_CONTROL_POLL = 0.05

OUTPUT_HWM = 1024
"""Messages that may wait in the output socket; then the engine merges what comes (design D9).

Far above what a turning loop leaves there: a PULL that has stopped at this mark loses what the system's buffer holds
when the other end of an ipc connection closes (libzmq 4.3.5, measured: EPOLLHUP ends the connection unread)."""


class MPClient(EngineCoreClient):
    """A client of one engine process, which it starts at once and without blocking, and ends in `shutdown`.

    executor_class: import path "module:Class" for the engine; None = the real one. client_addresses: {"input_address",
    "output_address"} to bind for an engine that somebody else starts and that connects to `client_count` clients, this
    one being number client_index; the engine process is then not ours (`process` is None). engine: one that runs
    already, to attach to; it gives us our client_index, and goes on when we leave. keep: for an engine with keep_alive;
    together with `engine` that one is made ours.

    resources: everything to give back; its finaliser stands before anything can fail.
    """

    def __init__(
        self,
        asyncio_mode: bool,
        args: EngineArgs,
        executor_class: str | None = None,
        log_stats: bool = True,
        client_addresses: Mapping[str, str] | None = None,
        client_index: int = 0,
        client_count: int = 1,
        engine: RunningEngine | None = None,
        keep: KeepAlive | None = None,
    ) -> None:
        self.args = args
        self.log_stats = log_stats
        self._client_index = client_index
        self._key: CurveKey | None = None
        self.client_count = client_count
        self.core_engine = engine_identity(0)
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.utility_results = UtilityCalls()
        self.pending_messages = PendingMessages()
        ctx: zmq.Context[Any] = zmq.Context()
        self.resources = BackgroundResources(ctx)
        self.resources.keep = keep
        self._finalizer = weakref.finalize(self, self.resources)
        success = False
        try:
            socket_ctx = zmq.asyncio.Context(ctx) if asyncio_mode else ctx
            metadata = None
            if engine is not None:
                self._bind_attached(socket_ctx, engine)
            elif client_addresses is None:
                metadata = self._bind_own(socket_ctx, args, executor_class)
            else:
                self._bind(socket_ctx, client_addresses["input_address"], client_addresses["output_address"])
            self.startup = Startup(self.core_engine, metadata)
            if metadata is not None:
                self._start_engine(metadata)
            success = True
        finally:
            if not success:
                self._finalizer()

    @property
    def input_socket(self) -> Any:
        """ROUTER, bound: to the engine."""
        return self._open(self.resources.input_socket)

    @property
    def output_socket(self) -> Any:
        """PULL, bound: from the engine."""
        return self._open(self.resources.output_socket)

    @property
    def client_index(self) -> int:
        """Whose outputs are ours; of an attached client once it is ready."""
        attachment = self.resources.attachment
        return self._client_index if attachment is None or attachment.client_index is None else attachment.client_index

    @property
    def process(self) -> WatchedProcess | None:
        return self.resources.process

    @property
    def running_engine(self) -> RunningEngine | None:
        """The engine, for others to attach to; None where it is not one of this machine's run directories."""
        if self.resources.attachment is not None:
            return self.resources.attachment.engine
        run, process = self.resources.run_directory, self.resources.process
        if run is None or process is None:
            return None
        return RunningEngine(run.path, process.pid, self.resources.owner_pid)

    @property
    def ready_response(self) -> EngineCoreReadyResponse | None:
        """What the engine said of itself, once it is ready."""
        return self.startup.response if self.startup.done else None

    @property
    def engine_dead(self) -> bool:
        return self.resources.engine_dead

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self.resources.dead_error() if self.resources.engine_dead else None

    @property
    def clock_offset(self) -> float:
        """As EngineCoreClient's, once it is ready."""
        return self.startup.clock.seconds

    def add_progress_callback(self, callback: ProgressCallback) -> None:
        """Call `callback(Progress)` at every stage of the load (handshake.STAGES), on the loop or thread that waits."""
        self.startup.add_progress_callback(callback)

    async def ping(self, timeout: float = STUCK_AFTER) -> Pong:  # noqa: ASYNC109 - what the exception speaks of
        """Ask the engine's control channel, which answers while everything else is busy. EngineStuckError."""
        self.ensure_alive()
        engine = self.running_engine
        if engine is None:
            raise EngineDeadError("This engine has no control channel; it was started by somebody else.")
        deadline = time.monotonic() + timeout
        while not engine.has_control:  # its process is just coming up
            if time.monotonic() > deadline:
                raise EngineStuckError.after(timeout)
            await asyncio.sleep(_CONTROL_POLL)  # nothing tells of a file that appears
        pong: Pong = await ask(engine.control_address, Ping(), Pong, timeout, engine.key)
        return pong

    def check_owner(self) -> None:
        """EngineDeadError if the client belongs to another process: we were forked."""
        if os.getpid() != self.resources.owner_pid:
            raise EngineDeadError(
                f"The engine belongs to process {self.resources.owner_pid}; a forked child cannot use it. "
                "Load the model in this process."
            )

    def ensure_alive(self) -> None:
        """EngineDeadError if the engine is dead, or the client belongs to another process."""
        self.check_owner()
        if self.resources.engine_dead or self.resources.process_exited:
            raise self.resources.dead_error()

    def startup_error(self) -> EngineStartupError:
        """Why the engine did not become ready: a fresh exception."""
        process, progress = self.resources.process, self.startup.last_progress
        attachment = self.resources.attachment
        return StartupFailure(
            stage=progress.stage if progress else "",
            reported=self.startup.reported,
            exitcode=process.exitcode if process else None,
            log_tail=process.log_tail() if process else "",
            by_owner=self.startup.given_up,
            attached_to=attachment.engine.pid if attachment is not None else None,
            refusal=attachment.failure if attachment is not None else "",
        ).error()

    def shutdown(self, timeout: float = 5.0, *, restarting: bool = False) -> int:
        """End the engine and give everything back; from any thread, idempotent, in `timeout` seconds or a little more.

        Everybody who waits gets an EngineDeadError. Returns the bytes of memory that the engine held. restarting:
        another one follows, and they hear so.
        """
        self._finalizer.detach()
        return self.resources.close(timeout, restarting=restarting)

    def _bind_own(
        self, ctx: "zmq.Context[Any]", args: EngineArgs, executor_class: str | None
    ) -> EngineHandshakeMetadata:
        sweep_dead()
        run = self.resources.run_directory = RunDirectory()
        key = self._key = CurveKey.generate() if run.transport == "tcp" else None
        input_address, output_address = self._bind(ctx, run.address("in0"), run.address("out0"), key)
        self.resources.handshake_socket = make_zmq_socket(ctx, run.address("hs"), zmq.ROUTER, linger=0, key=key)
        return EngineHandshakeMetadata(EngineAddresses([input_address], [output_address]), args, executor_class)

    def _bind_attached(self, ctx: "zmq.Context[Any]", engine: RunningEngine) -> None:
        adopts = self.resources.keep is not None
        try:
            attachment = self.resources.attachment = Attachment(engine, adopts=adopts)
            addresses = self._bind(ctx, attachment.input_address, attachment.output_address, attachment.key)
            attachment.bound(*addresses)
            if adopts:
                self.resources.run_directory = RunDirectory.join(
                    engine.run_path, "ipc" if attachment.key is None else "tcp"
                )
                self.resources.watch_process(AdoptedProcess(attachment))
            else:
                self.resources.watch_process(AttachedProcess(engine.pid, engine.log_path))
        except (FileNotFoundError, ProcessLookupError, zmq.ZMQError) as error:
            raise EngineDeadError(f"The engine (process {engine.pid}) is gone; load the model again.") from error

    def _bind(
        self, ctx: "zmq.Context[Any]", input_address: str, output_address: str, key: CurveKey | None = None
    ) -> tuple[str, str]:
        """Bind both; where they are then."""
        router = self.resources.input_socket = make_zmq_socket(ctx, input_address, zmq.ROUTER, linger=0, key=key)
        pull = make_zmq_socket(ctx, output_address, zmq.PULL, linger=0, hwm=OUTPUT_HWM, key=key)
        self.resources.output_socket = pull
        return bound_address(router), bound_address(pull)

    def _start_engine(self, metadata: EngineHandshakeMetadata) -> None:
        run = self.resources.run_directory
        assert run is not None
        write_private(run.file("init"), msgspec.msgpack.encode(metadata))
        if self._key is not None:
            write_private(run.file("key"), bytes(self._key))  # for guests: the engine hears it from us
        self.startup.progress(Progress("spawned"))
        process = EngineProcess(
            bound_address(self.resources.handshake_socket), run, key=self._key, keep_alive=self.args.lease
        )
        self.resources.watch_process(process)
        keep, card = self.resources.keep, RunCard(process.pid, os.getpid(), self.args.model, time.time())
        if keep is not None:
            card = replace(card, kernel=keep.kernel, name=keep.name, auto_restart=keep.auto_restart)
        card.write(run)

    def _open(self, socket: Any) -> Any:
        self.ensure_alive()
        return socket

    def _encode(self, request_type: EngineCoreRequestType, request: Any) -> tuple[Any, ...]:
        """The frames of a message, without the engine's identity."""
        return (request_type.value, *self.encoder.encode(request))
