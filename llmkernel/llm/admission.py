"""Admission: a request between add_request and the engine, while it waits for the load or is tokenised."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["Admission", "AdmissionAborted", "Admissions"]

T = TypeVar("T")


class AdmissionAborted(Exception):
    """The request was aborted before it was sent."""


class Admission:
    """One request on its way. `run` awaits something unless the request is aborted meanwhile."""

    def __init__(self) -> None:
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; AdmissionAborted, and the coroutine is cancelled, if abort() comes first."""
        task = asyncio.ensure_future(coroutine)
        try:
            waiters: set[asyncio.Future[Any]] = {task, self._aborted}
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self._aborted.done():
            if task.done() and not task.cancelled():
                task.exception()  # looked at: nobody else will
            raise AdmissionAborted
        return task.result()


class Admissions:
    """The requests on their way, by external id; an id may stand for several."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Admission]] = {}

    def enter(self, request_id: str) -> Admission:
        admission = Admission()
        self._by_id.setdefault(request_id, []).append(admission)
        return admission

    def leave(self, request_id: str, admission: Admission) -> None:
        waiting = self._by_id[request_id]
        waiting.remove(admission)
        if not waiting:
            del self._by_id[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for admission in self._by_id.get(request_id, ()):
                admission.abort()
