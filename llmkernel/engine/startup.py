"""The engine's side of the start-up: handshake, load, ready or failed, then the busy loop."""

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from llmkernel.engine.control_door import EngineDoor
from llmkernel.engine.core import EngineCore
from llmkernel.engine.core_proc import EngineCoreProc
from llmkernel.engine.departure import Departure
from llmkernel.engine.executor import resolve_executor_class
from llmkernel.logger import init_logger
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.handshake import (
    EngineHandshakeMetadata,
    EngineMessage,
    Hello,
    Progress,
    Ready,
    StartupFailed,
)
from llmkernel.protocol.requests import engine_identity
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["EngineHandshake", "run_engine"]

logger = init_logger(__name__)

PROGRESS_INTERVAL = 0.05
"""Seconds between two progress messages of one stage; the first and the last of a stage always go."""

INIT_PATIENCE_MS = 100
"""How long to wait for INIT before its copy is used."""

_LINGER_MS = 5000


class EngineHandshake:
    """The handshake socket of one engine process: DEALER, connect. Use it with `with`: leaving sends what waits.

    `report` may be called from any thread (a download has its own), everything else from the main one. heard: whether
    there is still somebody at the other end.
    """

    def __init__(
        self, address: str, engine_index: int, key: CurveKey | None = None, heard: Callable[[], bool] = lambda: True
    ) -> None:
        self._heard = heard
        self._lock = threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)
        self._init_clock = 0.0
        self._ctx = zmq.Context()
        self._socket = make_zmq_socket(
            self._ctx,
            address,
            zmq.DEALER,
            bind=False,
            identity=engine_identity(engine_index),
            linger=_LINGER_MS,
            key=key,
        )

    def hello(self, pid: int) -> None:
        self._send(Hello(pid=pid, clock=time.monotonic()))

    def receive_init(self, copy: Path) -> EngineHandshakeMetadata:
        """Wait for INIT, as long as the owner lives. An owner answers when its event loop turns, which may be much
        later: so it leaves a copy in the run directory, which is read if no answer comes soon.
        """
        if not self._socket.poll(INIT_PATIENCE_MS) and copy.exists():
            return msgspec.msgpack.decode(copy.read_bytes(), type=EngineHandshakeMetadata)
        payload = self._socket.recv()
        self._init_clock = time.monotonic()
        return msgspec.msgpack.decode(payload, type=EngineHandshakeMetadata)

    def report(self, stage: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        """Staged progress of the load (ReportProgress); too frequent reports of one stage are left out."""
        with self._lock:
            last_stage, last_time = self._last
            now = time.monotonic()
            if stage == last_stage and done != total and now - last_time < PROGRESS_INTERVAL:
                return
            self._last = (stage, now)
            self._socket.send(msgspec.msgpack.encode(Progress(stage, done, total, detail)))

    def ready(self, timings: dict[str, float]) -> None:
        self._send(Ready(timings=timings, clock=time.monotonic(), init_clock=self._init_clock))

    def failed(self, error: BaseException) -> None:
        self._send(StartupFailed(type(error).__name__, str(error), "".join(traceback.format_exception(error))))

    def close(self, linger: int) -> None:
        """Close the socket; waits up to `linger` milliseconds until the owner has what was sent."""
        self._socket.close(linger)
        self._ctx.term()

    def __enter__(self) -> "EngineHandshake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_LINGER_MS if kind is not SystemExit and self._heard() else 0)

    def _send(self, message: EngineMessage) -> None:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(message))


def run_engine(
    handshake_address: str,
    engine_index: int,
    run: RunDirectory,
    departure: Departure,
    door: EngineDoor,
    key: CurveKey | None = None,
) -> int:
    """Start the engine that the owner describes at `handshake_address`, serve until the end; returns the exit code."""
    with EngineHandshake(handshake_address, engine_index, key, lambda: not door.starter_left) as handshake:
        handshake.hello(os.getpid())
        try:
            proc = _load(handshake, engine_index, run, door, key)
        except Exception as error:  # whatever ends a load is told to the owner, and with its traceback to the log
            logger.exception("The engine did not start.")
            handshake.failed(error)
            return 1
        gc.freeze()
        handshake.ready(proc.core.ready.load_timings)
    departure.attach_loop(proc.request_shutdown, proc.say_farewell)
    door.open(proc)
    return proc.run()


def _load(
    handshake: EngineHandshake, engine_index: int, run: RunDirectory, door: EngineDoor, key: CurveKey | None
) -> EngineCoreProc:
    def report(stage: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        door.progress(Progress(stage, done, total, detail))
        handshake.report(stage, done, total, detail)

    init = handshake.receive_init(run.file("init"))
    door.describe(init.engine_args)
    report("importing")
    executor_class = resolve_executor_class(init.executor_class)
    core = EngineCore(init.engine_args, executor_class(), report)
    proc = EngineCoreProc(core, init.addresses, engine_index, key)
    proc.start_io_threads()
    return proc
