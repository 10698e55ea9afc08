"""EngineCoreClient: what every client of an engine can do."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from llmkernel.errors import EngineDeadError
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest

__all__ = ["EngineCoreClient"]


class EngineCoreClient(abc.ABC):
    """The front end's handle on one engine. Subclasses have the blocking methods, the async ones, or both.

    A client ends what it started: `shutdown`, or `with`.
    """

    @abc.abstractmethod
    def shutdown(self, timeout: float = 5.0) -> int:
        """End the engine; idempotent. Returns the bytes of memory that its process held."""

    @property
    @abc.abstractmethod
    def engine_dead(self) -> bool:
        """The engine will not answer any more."""

    @property
    @abc.abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Why, once it is dead: a fresh exception at each call."""

    @property
    def clock_offset(self) -> float:
        """Seconds to add to the engine's time.monotonic() to have this process's."""
        return 0.0

    def ready(self) -> Any:
        """Wait until the engine takes requests: EngineCoreReadyResponse, or an awaitable of it."""
        raise NotImplementedError

    def get_output(self) -> EngineCoreOutputs:
        raise NotImplementedError

    def add_request(self, request: EngineCoreRequest) -> None:
        raise NotImplementedError

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    def call_utility(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    async def get_output_async(self) -> EngineCoreOutputs:
        raise NotImplementedError

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        raise NotImplementedError

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on every worker of the engine; one result per worker."""
        return self.call_utility("collective_rpc", method, timeout, args, dict(kwargs or {}))

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels to the workers
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `collective_rpc`."""
        return await self.call_utility_async("collective_rpc", method, timeout, args, dict(kwargs or {}))

    def __enter__(self) -> "EngineCoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
