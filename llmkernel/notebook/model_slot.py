"""ModelSlot: one model of a session: its engine, from the start of the load to the end of the process."""

import asyncio
import contextlib
import copy
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.keep_alive import KeepAlive
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError, LLMKernelError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.logger import init_logger
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.queue_watch import QueueWatch
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress

__all__ = ["ModelSlot", "executor_class_for"]

logger = init_logger(__name__)

RESTART_TIMEOUT = 2.0
"""Seconds that an engine gets to leave when it is restarted: then it is likely in trouble."""

MOST_RESTARTS = 3
"""Restarts by itself within RESTART_WINDOW seconds; an engine that dies again and again is left dead."""

RESTART_WINDOW = 60.0

LEASE_TIMEOUT = 0.2
"""Seconds for an engine to hear that its kernel will not come back: a shutdown is not held up for longer."""


def executor_class_for(model: str) -> str | None:
    """Import path of the executor that runs `model`: "fake:..." is answered without a model; None = the real one."""
    return "llmkernel.engine.fake_executor:FakeExecutor" if model.startswith("fake:") else None


class ModelSlot:
    """Owns an AsyncLLM. The load begins at once and goes on whoever waits for it; `shutdown` ends everything.

    name: what --model calls it. llm: the AsyncLLM. queue: where its requests stand in the engine. progress: the newest
    step of the load. load_began: by the monotonic clock. load_seconds: None while it loads. listeners: called at every
    step of the load, when it is over, and when the engine has died. auto_restart: an engine that dies is started
    again, MOST_RESTARTS times at most; what it was asked has failed, and stays so.
    """

    def __init__(
        self,
        name: str,
        args: EngineArgs,
        executor_class: str | None = None,
        *,
        auto_restart: bool = False,
        engine: RunningEngine | None = None,
        keep: KeepAlive | None = None,
    ) -> None:
        """engine, keep: see AsyncLLM."""
        self.name = name
        self.args = args
        self.progress: Progress | None = None
        self.load_seconds: float | None = None
        self.ended = False
        self.listeners: list[Callable[[], None]] = []
        self.auto_restart = auto_restart
        self._restarts: deque[float] = deque(maxlen=MOST_RESTARTS)
        executor_class = executor_class or executor_class_for(args.model)
        self.llm = AsyncLLM(args, executor_class=executor_class, engine=engine, keep=keep)
        self.llm.add_progress_callback(self._on_progress)
        self.queue = QueueWatch(self.llm)
        self._begin(self.llm.ready)

    @property
    def state(self) -> str:
        """ "loading", "ready", "failed", "dead" or "unloaded"."""
        if self.ended:
            return "unloaded"
        if not self._load.done():
            return "loading"
        if self._load.cancelled() or self._load.exception() is not None:
            return "failed"
        return "dead" if self.llm.errored else "ready"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where it was loaded."""
        return self._load.get_loop()

    @property
    def re_attached(self) -> bool:
        """An earlier kernel loaded it, and it was kept alive."""
        return self.llm.re_attached

    @property
    def failure(self) -> BaseException | None:
        """What ended the load, if something did."""
        return self._load.exception() if self._load.done() and not self._load.cancelled() else None

    @property
    def facts(self) -> EngineCoreReadyResponse | None:
        """What was loaded; None until it is."""
        return self.llm.facts

    @property
    def loading(self) -> bool:
        return self.state == "loading"

    async def ready(self) -> AsyncLLM:
        """The engine, once it takes requests. Cancelling the wait leaves the load alone."""
        try:
            await asyncio.shield(self._load)
        except asyncio.CancelledError:
            if self._load.cancelled():
                raise brief(self._load_was_ended()) from None
            raise
        except EngineStartupError as error:
            raise brief(self._load_was_ended() if self.ended else _with_hint(error, self.name)) from None
        if self.ended:
            raise brief(EngineDeadError(f"{self.name} was unloaded; load it again."))
        return self.llm

    def restart(self) -> None:
        """End the engine, dead or alive, and start it again; `llm` stays the same object. Call it on the loop."""
        self.progress = None
        self.load_seconds = None
        self._begin(lambda: self.llm.restart(RESTART_TIMEOUT))
        self.tell()

    def shutdown(self) -> int:
        """End the engine process. From any thread, idempotent; blocks until it is gone. Bytes of memory given back."""
        self.ended = True
        return self.llm.shutdown()

    def give_up_lease(self) -> None:
        """An engine with keep_alive is to end with us all the same. From any thread."""
        engine = self.llm.running_engine
        if self.args.keep_alive is not None and engine is not None and engine.has_control:
            with contextlib.suppress(LLMKernelError), engine.control() as control:  # it may be gone, or not ours
                control.keep_alive(0, LEASE_TIMEOUT)

    def cancel_load(self) -> None:
        self._load.cancel()

    def _load_was_ended(self) -> EngineStartupError:
        return EngineStartupError(f"The load of {self.name} was ended; load it again.")

    def _begin(self, load: Callable[[], Awaitable[EngineCoreReadyResponse]]) -> None:
        self.load_began = time.monotonic()
        self._load = asyncio.ensure_future(self._wait_for_engine(load))
        self._load.add_done_callback(self._on_load_over)

    async def _wait_for_engine(self, load: Callable[[], Awaitable[EngineCoreReadyResponse]]) -> None:
        try:
            await load()
            self.load_seconds = time.monotonic() - self.load_began
            self._watch_engine()
        except EngineStartupError:
            await asyncio.to_thread(self.llm.shutdown)
            raise

    def _on_load_over(self, load: "asyncio.Future[None]") -> None:
        if not load.cancelled():
            load.exception()  # whoever waits gets it; nobody need wait
        self.tell()

    def _watch_engine(self) -> None:
        """Hear of the engine's end. Without holding this slot: a forgotten one is collected, and its engine ends."""
        handler, slot = self.llm.output_handler, weakref.ref(self)
        assert handler is not None  # it is ready

        def ended(_: "asyncio.Future[None]") -> None:
            if (found := slot()) is not None:
                found._on_engine_ended()

        handler.add_done_callback(ended)

    def _on_engine_ended(self) -> None:
        if self.state != "dead":
            return
        now = time.monotonic()
        if self.auto_restart and (len(self._restarts) < MOST_RESTARTS or now - self._restarts[0] > RESTART_WINDOW):
            self._restarts.append(now)
            logger.warning("The engine of %s is restarted: %s", self.name, self.llm.dead_error)
            self.restart()
        else:
            self.tell()

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.tell()

    def tell(self) -> None:
        """Call the listeners: there is news."""
        for listener in list(self.listeners):
            listener()

    @property
    def process(self) -> Any:
        """The engine's process: pid, log_tail(lines), memory()."""
        return self.llm.engine_core.process  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<ModelSlot {self.name}: {self.state}>"


def _with_hint(error: EngineStartupError, name: str) -> EngineStartupError:
    """A fresh `error`; where it is an exception of the engine's, not a mistake of the user's, with where to read on."""
    fresh = copy.copy(error)
    if error.remote_type and f": {error.remote_type}: " in str(error):
        fresh.args = (f"{error} %llm logs {name} shows where.",)
    return fresh
