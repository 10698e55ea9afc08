"""BackgroundResources: everything that a client must give back, in one object that does not know the client.

It is the client's finaliser (weakref.finalize), so it works when the client is shut down, collected, or still there
when the interpreter ends; and it does nothing in a forked child.
"""

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from llmkernel.client.attachment import Attachment
from llmkernel.client.failure import EngineDeath
from llmkernel.client.keep_alive import KeepAlive
from llmkernel.client.watched_process import WatchedProcess
from llmkernel.errors import EngineDeadError
from llmkernel.logger import init_logger
from llmkernel.protocol.outputs import ENGINE_CORE_DEAD, UtilityFailure
from llmkernel.protocol.run_directory import RunDirectory

__all__ = ["BackgroundResources"]

logger = init_logger(__name__)

FINALIZER_TIMEOUT = 0.2
"""Seconds that the engine gets to leave when nobody called shutdown(): an interpreter that ends must not be held up."""

_LOOP_WAIT = 0.2
_DEAD_FRAME = ENGINE_CORE_DEAD


class BackgroundResources:
    """Owns context, sockets, tasks, process and run directory of one client. `close` gives all back, once.

    engine_dead: true as soon as the engine's end is known, whoever caused it. closing: it was us. The client's mode
    sets three hooks, which must not hold the client: on_exit, called on the monitor thread when the process ends by
    itself; on_release, to fail everybody who waits; on_close, before the sockets are closed. The last two run where the
    sockets may be touched.
    """

    def __init__(self, ctx: "zmq.Context[Any]") -> None:
        self.owner_pid = os.getpid()
        self.ctx = ctx
        self.run_directory: RunDirectory | None = None
        self.process: WatchedProcess | None = None
        self.attachment: Attachment | None = None  # at an engine that somebody else has started
        self.keep: KeepAlive | None = None
        self.input_socket: Any = None  # zmq.Socket, or its asyncio kind
        self.output_socket: Any = None
        self.handshake_socket: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.on_exit: Callable[[], None] = lambda: None
        self.on_release: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self.engine_dead = False
        self.closing = False
        self._engine_stays = False
        self.bytes_given_back = 0
        self._death = EngineDeath()
        self._close_lock = threading.Lock()
        self._sockets_closed = threading.Event()

    def __call__(self) -> None:
        """The finaliser. A kernel that will come back finds its engine again."""
        self._engine_stays = self.keep is not None and self.keep.restarting()
        self.close(FINALIZER_TIMEOUT)

    # The engine's end.

    @property
    def process_exited(self) -> bool:
        return self.process is not None and self.process.exited

    def validate_alive(self, frames: "Sequence[Any]") -> None:
        """EngineDeadError if `frames` is the one frame ENGINE_CORE_DEAD."""
        if len(frames) == 1 and len(frames[0]) == len(_DEAD_FRAME) and bytes(frames[0]) == _DEAD_FRAME:
            self.engine_dead = True
            raise self.dead_error()

    def record_fault(self, fault: UtilityFailure) -> None:
        """The engine said what ends it."""
        self._death = EngineDeath(fault=fault)

    def record_death(self) -> None:
        """Nothing will come from the engine any more."""
        self.engine_dead = True

    def dead_error(self) -> EngineDeadError:
        """A fresh exception that says how the engine ended, as far as that is known by now."""
        attachment = self.attachment
        owner = attachment.engine.owner_pid if attachment is not None and not attachment.owns else None
        death, process = dataclasses.replace(self._death, shared_owner=owner), self.process
        if process is not None and not death.by_owner:
            death = dataclasses.replace(death, exitcode=process.exitcode, log_tail=process.log_tail())
        return death.error()

    def watch_process(self, process: WatchedProcess) -> None:
        self.process = process
        process.add_exit_callback(self._on_process_exit)

    def _on_process_exit(self, process: WatchedProcess) -> None:
        if not self.closing:
            self.on_exit()

    # Giving back.

    def close(self, timeout: float, *, restarting: bool = False) -> int:
        """End the engine and give everything back; from any thread, idempotent. Returns the bytes it held.

        restarting: another one follows, and whoever waits hears so.
        """
        if os.getpid() != self.owner_pid:
            return 0
        with self._close_lock:
            if self.closing:
                return self.bytes_given_back
            if not (self.engine_dead or self.process_exited):
                self._death = EngineDeath(by_owner=True, restarted=restarting)
            self.closing = self.engine_dead = True
            with contextlib.ExitStack() as steps:  # from the last one upwards; an interrupt skips none of the others
                if self.run_directory is not None:
                    steps.callback(self.run_directory.leave if self._engine_stays else self.run_directory.close)
                steps.callback(self._close_sockets_where_they_live)
                steps.callback(self._leave_engine, timeout)
                steps.callback(self._run_where_sockets_live, self.on_release)
            return self.bytes_given_back

    def _leave_engine(self, timeout: float) -> None:
        if self._engine_stays:
            return
        if self.attachment is not None and not self.attachment.owns and not self.process_exited:
            self.attachment.detach()
        if self.process is not None:
            if self.run_directory is not None:
                self.run_directory.remove()  # if we are killed now, the engine has nothing to leave behind
            self.bytes_given_back = self.process.shutdown(timeout)

    def _close_sockets_where_they_live(self) -> None:
        if not self._run_where_sockets_live(self._close_sockets):
            self._sockets_closed.wait(_LOOP_WAIT)

    def _run_where_sockets_live(self, function: Callable[[], None]) -> bool:
        """On the client's loop if that turns in another thread, else here and now; says whether it was now."""
        loop = self.loop
        if loop is not None and loop.is_running() and _running_loop() is not loop:
            with contextlib.suppress(RuntimeError):  # it was closed this very moment
                loop.call_soon_threadsafe(function)
                return False
        function()
        return True

    def _close_sockets(self) -> None:
        self.on_close()
        reader = self.tasks.get("outputs")
        if reader is not None and self.loop is not None and not self.loop.is_closed():
            reader.cancel()
        for socket in (self.input_socket, self.output_socket, self.handshake_socket):
            if socket is not None:
                socket.close(linger=0)
        self.ctx.term()
        self._sockets_closed.set()

    def close_handshake(self) -> None:
        """The start-up is over: nobody else has anything to say there."""
        if self.handshake_socket is not None:
            self.handshake_socket.close(linger=0)
            self.handshake_socket = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
