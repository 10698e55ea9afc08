"""RequestOutputCollector: the queue of one request, with a single place."""

import asyncio
import threading

from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputCollector"]


class RequestOutputCollector:
    """Hands outputs of one request from whoever processes them to its one consumer; never sent to the engine.

    Holds one output: a later one merges into it (deltas join, others replace), so a slow consumer costs no memory and
    loses nothing. An exception waits behind the output that was there before it, so text that came is not lost. Bound
    to no loop: `put` may be called from any thread, `get` is awaited on the consumer's loop, `get_nowait` needs none.
    `request_id` is the internal id (the parent's, when n > 1); `sampling_params` are those in effect, once it is
    submitted.
    """

    __slots__ = (
        "_exception",
        "_lock",
        "_output",
        "_waiter",
        "_waiter_thread",
        "aggregate",
        "output_kind",
        "request_id",
        "sampling_params",
    )

    def __init__(self, output_kind: RequestOutputKind, request_id: str = "") -> None:
        self.output_kind = output_kind
        self.request_id = request_id
        self.aggregate = output_kind == RequestOutputKind.DELTA
        self.sampling_params: SamplingParams | None = None
        self._output: RequestOutput | None = None
        self._exception: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiter_thread = 0
        self._lock = threading.Lock()

    @property
    def has_item(self) -> bool:
        """Whether `get_nowait` would find something."""
        return self._output is not None or self._exception is not None

    def put(self, item: RequestOutput | BaseException) -> None:
        """Deliver an output, or the exception that ends the stream. Never blocks."""
        with self._lock:
            if isinstance(item, BaseException):
                self._exception = item
            elif self._output is None:
                self._output = item
            else:
                self._output.add(item, aggregate=self.aggregate)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._wake(waiter)

    async def get(self) -> RequestOutput:
        """The next output; raises the exception that was put."""
        while True:
            with self._lock:
                if self.has_item:
                    return self._take()
                if self._waiter is not None and not self._waiter.done():
                    raise RuntimeError("Two tasks read the same request; give each its own request.")
                waiter = self._waiter = asyncio.get_running_loop().create_future()
                self._waiter_thread = threading.get_ident()
            await waiter

    def get_nowait(self) -> RequestOutput | None:
        """The next output, None if there is none yet; raises the exception that was put."""
        with self._lock:
            return self._take() if self.has_item else None

    def _take(self) -> RequestOutput:
        output, self._output = self._output, None
        if output is None:
            assert self._exception is not None
            raise self._exception
        return output

    def _wake(self, waiter: "asyncio.Future[None]") -> None:
        loop = waiter.get_loop()
        if loop.is_closed():
            return  # nothing runs there any more
        if self._waiter_thread == threading.get_ident():
            _resolve(waiter)
        else:
            loop.call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
