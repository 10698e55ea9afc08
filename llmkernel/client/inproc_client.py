"""InprocClient: the engine in this process, without sockets or a busy loop; each `get_output` is one step."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from llmkernel.client.engine_core_client import EngineCoreClient
from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import resolve_executor_class
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest

__all__ = ["InprocClient"]


class InprocClient(EngineCoreClient):
    """For lessons, tests and profiling: loads in the constructor, blocks in every step, with torch in this process.

    Import it lazily: it is the only client that imports the engine.
    """

    def __init__(self, args: EngineArgs, executor_class: str | None = None, log_stats: bool = True) -> None:
        self.log_stats = log_stats
        self.progress: list[Progress] = []
        self._shut_down = False
        self.engine_core = EngineCore(args, resolve_executor_class(executor_class)(), self._report)
        self._compiled = threading.Event()
        self.engine_core.on_grammar_compiled = self._compiled.set

    @property
    def engine_dead(self) -> bool:
        return self._shut_down

    @property
    def dead_error(self) -> EngineDeadError | None:
        return EngineDeadError("The engine was shut down; load the model again.") if self._shut_down else None

    def ready(self) -> EngineCoreReadyResponse:
        return self.engine_core.ready

    def get_output(self) -> EngineCoreOutputs:
        """Run one step; its outputs (none if there was nothing to do). Waits where all requests wait for a grammar."""
        self._ensure_alive()
        self._compiled.clear()
        if self.engine_core.scheduler.compiling and not self.engine_core.has_requests():
            self._compiled.wait()
        return self.engine_core.step().get(0, EngineCoreOutputs())

    def add_request(self, request: EngineCoreRequest) -> None:
        """InvalidRequestError if the engine cannot take it: here it can be raised where it was sent."""
        self._ensure_alive()
        request.client_index = 0
        self.engine_core.add_request(self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if request_ids and not self._shut_down:
            self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility; its own exception passes through."""
        self._ensure_alive()
        result = self.engine_core.call_utility(method, args)
        if not isinstance(result, Future):
            return result
        if not result.done():
            raise InvalidRequestError(
                f"{method} cannot wait without a busy loop; call get_output first, until nothing runs."
            )
        return result.result()

    def shutdown(self, timeout: float = 5.0) -> int:
        """Give the engine back; no process ends, so no memory is counted."""
        if not self._shut_down:
            self._shut_down = True
            self.engine_core.shutdown()
        return 0

    def _ensure_alive(self) -> None:
        error = self.dead_error
        if error is not None:
            raise error

    def _report(self, stage: str, done: int, total: int, detail: str) -> None:
        self.progress.append(Progress(stage, done, total, detail))
