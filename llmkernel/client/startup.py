"""The start-up of one engine as a state machine without sockets; the sync and the async client feed it."""

import enum
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from llmkernel.client.clock_offset import ClockOffset
from llmkernel.logger import init_logger
from llmkernel.protocol.handshake import (
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineMessage,
    Hello,
    ModelFacts,
    Progress,
    Ready,
    StartupFailed,
    TokenizerFacts,
)
from llmkernel.protocol.requests import EngineIdentity

__all__ = ["ProgressCallback", "Startup", "StartupState"]

logger = init_logger(__name__)

ProgressCallback = Callable[[Progress], None]


class StartupState(enum.Enum):
    """NEW: no word yet. CONNECTED: HELLO came, INIT goes out. STARTED: READY came. READY: it registered, too."""

    NEW = enum.auto()
    CONNECTED = enum.auto()
    STARTED = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


class Startup:
    """Takes what comes on the handshake socket and on the input socket; says what to send and how far things are.

    metadata: the INIT message, None for an engine that somebody else starts: then registering is all there is. Messages
    that are malformed, from another identity or out of order are logged and ignored: the sockets are private, but a
    start must not depend on that. clock: the engine's against ours.
    """

    def __init__(self, identity: EngineIdentity, metadata: EngineHandshakeMetadata | None) -> None:
        self._identity = identity
        self._metadata = metadata
        self._callbacks: list[ProgressCallback] = []
        self._registered = False
        self.clock = ClockOffset()
        self._init_sent = 0.0
        self.state = StartupState.NEW if metadata is not None else StartupState.STARTED
        self.last_progress: Progress | None = None
        self.response: EngineCoreReadyResponse | None = None
        self.reported: StartupFailed | None = None
        self.given_up = False

    @property
    def done(self) -> bool:
        return self.state is StartupState.READY

    @property
    def over(self) -> bool:
        """Ready or failed."""
        return self.state in (StartupState.READY, StartupState.FAILED)

    @property
    def needs_handshake(self) -> bool:
        """The handshake socket still has something to say."""
        return self.state in (StartupState.NEW, StartupState.CONNECTED)

    def add_progress_callback(self, callback: ProgressCallback) -> None:
        """Call `callback` with every Progress from now on, the latest one at once. An exception in it is logged."""
        if self.state is not StartupState.READY:
            self._callbacks.append(callback)
        if self.last_progress is not None:
            _call(callback, self.last_progress)

    def progress(self, progress: Progress) -> None:
        self.last_progress = progress
        for callback in list(self._callbacks):
            _call(callback, progress)

    def handshake_message(self, frames: "Sequence[Any]") -> list[bytes] | None:
        """Take a message of the handshake ROUTER ([identity, payload]); returns the reply to send, if any."""
        message = self._decode(frames)
        if isinstance(message, Hello) and self.state is StartupState.NEW:
            if not message.local or message.headless:
                logger.error("Ignored a HELLO of an engine that is not local (%s).", message)
                return None
            self.state = StartupState.CONNECTED
            self._init_sent = time.monotonic()
            self.clock.heard(message.clock, self._init_sent)
            return [self._identity, msgspec.msgpack.encode(self._metadata)]
        if self.state is not StartupState.CONNECTED or isinstance(message, Hello):
            if message is not None:
                logger.error("Ignored a %s in state %s.", type(message).__name__, self.state.name)
            return None
        if isinstance(message, Progress):
            self.progress(message)
        elif isinstance(message, StartupFailed):
            self.reported = message
            self.state = StartupState.FAILED
        elif isinstance(message, Ready):
            self.clock.heard(message.clock, time.monotonic())
            self.clock.told(self._init_sent, message.init_clock)
            self.state = StartupState.STARTED
            self._finish()
        return None

    def registration_message(self, frames: "Sequence[Any]") -> None:
        """Take the first message of an engine on the input ROUTER. An empty one comes from an old peer (seed S0)."""
        try:
            identity, payload = (bytes(frame) for frame in frames)
            response = _OLD_PEER if not payload else msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Ignored a malformed registration: %s", error)
            return
        if identity != self._identity or self._registered:
            logger.error("Ignored the registration of %r.", identity)
            return
        self._registered = True
        self.response = response
        self._finish()

    def fail(self, *, by_owner: bool = False) -> None:
        """It will not become ready any more: the process is gone, or (by_owner) nobody wants it."""
        self.state = StartupState.FAILED
        self.given_up = by_owner
        self._callbacks.clear()

    def _finish(self) -> None:
        if self._registered and self.state is StartupState.STARTED:
            self.state = StartupState.READY
            self.progress(Progress("ready"))
            self._callbacks.clear()

    def _decode(self, frames: "Sequence[Any]") -> EngineMessage | None:
        try:
            identity, payload = (bytes(frame) for frame in frames)
            message = msgspec.msgpack.decode(payload, type=EngineMessage)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Ignored a malformed handshake message: %s", error)
            return None
        if identity != self._identity:
            logger.error("Ignored a handshake message of %r.", identity)
            return None
        return message


_OLD_PEER = EngineCoreReadyResponse(
    version="",
    max_model_len=0,
    num_gpu_blocks=0,
    block_size=0,
    max_num_seqs=0,
    max_num_batched_tokens=0,
    model=ModelFacts("", "", "", "", "", "", 0, 0),
    tokenizer=TokenizerFacts(),
)
"""What is known of an engine that registers with an empty message: nothing."""


def _call(callback: ProgressCallback, progress: Progress) -> None:
    try:
        callback(progress)
    except Exception:  # a progress display must not stop a load
        logger.exception("A progress callback failed.")
