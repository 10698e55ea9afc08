"""Utility calls that wait for their answer: one registry for the sync and the async client."""

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from llmkernel.errors import UtilityCallError
from llmkernel.logger import init_logger
from llmkernel.protocol.outputs import UtilityFailure, UtilityOutput

__all__ = ["AnyFuture", "UtilityCalls"]

logger = init_logger(__name__)


class AnyFuture(Protocol):
    """What asyncio's and concurrent.futures' futures have in common."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Any, /) -> None: ...


class UtilityCalls:
    """call_id -> (method, future). Used where the futures live: on the loop, or under the GIL by the output thread."""

    def __init__(self) -> None:
        self._call_ids = itertools.count(1)
        self._futures: dict[int, tuple[str, AnyFuture]] = {}

    def open(self, method: str, future: AnyFuture) -> int:
        """Register a call before it is sent; returns its id."""
        call_id = next(self._call_ids)
        self._futures[call_id] = (method, future)
        return call_id

    def discard(self, call_id: int) -> None:
        """Nobody waits for this answer any more; it is dropped when it comes."""
        self._futures.pop(call_id, None)

    def process_utility_output(self, output: UtilityOutput) -> None:
        """Settle the call that `output` answers. An unknown id or a cancelled future is no error: its caller left."""
        method, future = self._futures.pop(output.call_id, ("", None))
        if future is None or future.done():
            if output.failure is not None:
                logger.warning("A utility call that nobody waits for failed: %s", output.failure.message)
        elif output.failure is not None:
            future.set_exception(_call_error(method, output.failure))
        else:
            future.set_result(None if output.result is None else output.result.result)

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """Fail every waiting call, each with an exception of its own."""
        waiting, self._futures = self._futures, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(error())

    def __len__(self) -> int:
        return len(self._futures)


def _call_error(method: str, failure: UtilityFailure) -> UtilityCallError:
    return UtilityCallError(
        f"{method} failed in the engine: {failure.type}: {failure.message}",
        remote_type=failure.type,
        remote_traceback=failure.traceback,
    )
