"""QueueWatch: where the requests of a model stand in the engine, asked for while somebody looks."""

import asyncio
import contextlib
import time

from llmkernel.errors import LLMKernelError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.logger import init_logger
from llmkernel.notebook.request_ids import shown_id
from llmkernel.protocol.stats import RequestProgress

__all__ = ["QueueWatch"]

logger = init_logger(__name__)

INTERVAL = 0.2
"""Seconds between two questions at least: views look at their rows four times a second."""


class QueueWatch:
    """Knows what the engine said last of requests that bring no tokens: they wait, or their prompt is being read.

    Every look asks it anew, never twice at once and at most every INTERVAL seconds; who does not look costs nothing.
    The engine answers between two steps. Use it on the loop that the requests belong to.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._told: dict[str, RequestProgress] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked = 0.0

    def find(self, request_id: str) -> RequestProgress | None:
        """The newest that is known of a request ("g3", or "1_g3", the second of its answers)."""
        if time.monotonic() - self._asked >= INTERVAL:
            with contextlib.suppress(RuntimeError):  # no loop runs here: what is known has to do
                self._ask()
        return self._told.get(request_id)

    async def refresh(self, timeout: float) -> None:  # noqa: ASYNC109 - an engine in a long step is not waited for
        """Ask, and wait for the answer for at most `timeout` seconds."""
        if self._llm.is_running:
            await asyncio.wait([self._ask()], timeout=timeout)

    def _ask(self) -> "asyncio.Task[None]":
        if self._asking is None or self._asking.done():
            self._asked = time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._take_answer(), name="llmkernel-queue-watch")
        return self._asking

    async def _take_answer(self) -> None:
        try:
            told = await self._llm.get_request_progress() if self._llm.is_running else []
        except LLMKernelError:  # the engine is gone, or does not know the question; who waits for it hears of that
            logger.debug("Nobody says where the requests stand.", exc_info=True)
            told = []
        self._told = {shown_id(one.request_id): one for one in told}
