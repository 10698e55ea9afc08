"""The engine's side of the start-up: handshake, load, ready or failed, then the busy loop."""

import gc
import threading
import time
import traceback
from types import TracebackType

import msgspec
import zmq

from llmkernel.engine.core import EngineCore
from llmkernel.engine.core_proc import EngineCoreProc
from llmkernel.engine.departure import Departure
from llmkernel.engine.executor import resolve_executor_class
from llmkernel.logger import init_logger
from llmkernel.protocol.handshake import (
    EngineHandshakeMetadata,
    EngineMessage,
    Hello,
    Progress,
    Ready,
    StartupFailed,
)
from llmkernel.protocol.requests import engine_identity
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["EngineHandshake", "run_engine"]

logger = init_logger(__name__)

PROGRESS_INTERVAL = 0.05
"""Seconds between two progress messages of one stage; the first and the last of a stage always go."""

_LINGER_MS = 5000


class EngineHandshake:
    """The handshake socket of one engine process: DEALER, connect. Use it with `with`: leaving sends what waits.

    `report` may be called from any thread (a download has its own), everything else from the main one.
    """

    def __init__(self, address: str, engine_index: int) -> None:
        self._lock = threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)
        self._ctx = zmq.Context()
        self._socket = make_zmq_socket(
            self._ctx, address, zmq.DEALER, bind=False, identity=engine_identity(engine_index), linger=_LINGER_MS
        )

    def hello(self, pid: int) -> None:
        self._send(Hello(pid=pid))

    def receive_init(self) -> EngineHandshakeMetadata:
        """Wait for INIT, as long as the owner lives: it answers when its event loop turns, which may be much later."""
        return msgspec.msgpack.decode(self._socket.recv(), type=EngineHandshakeMetadata)

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
        self._send(Ready(timings=timings))

    def failed(self, error: BaseException) -> None:
        self._send(StartupFailed(type(error).__name__, str(error), "".join(traceback.format_exception(error))))

    def close(self, linger: int = _LINGER_MS) -> None:
        """Close the socket; waits up to `linger` milliseconds until the owner has what was sent."""
        self._socket.close(linger)
        self._ctx.term()

    def __enter__(self) -> "EngineHandshake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0 if kind is SystemExit else _LINGER_MS)

    def _send(self, message: EngineMessage) -> None:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(message))


def run_engine(handshake_address: str, engine_index: int, pid: int, departure: Departure) -> int:
    """Start the engine that the owner describes at `handshake_address`, serve until the end; returns the exit code."""
    with EngineHandshake(handshake_address, engine_index) as handshake:
        handshake.hello(pid)
        try:
            proc = _load(handshake, engine_index)
        except Exception as error:  # whatever ends a load is told to the owner, and with its traceback to the log
            logger.exception("The engine did not start.")
            handshake.failed(error)
            return 1
        gc.freeze()
        handshake.ready(proc.core.ready.load_timings)
    departure.attach_loop(proc.request_shutdown, proc.say_farewell)
    return proc.run()


def _load(handshake: EngineHandshake, engine_index: int) -> EngineCoreProc:
    init = handshake.receive_init()
    handshake.report("importing")
    executor_class = resolve_executor_class(init.executor_class)
    core = EngineCore(init.engine_args, executor_class(), handshake.report)
    proc = EngineCoreProc(core, init.addresses, engine_index)
    proc.start_io_threads()
    return proc
