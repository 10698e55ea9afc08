"""StatLogger: a line about the engine every ten seconds, under `llmkernel.stats`, while it works."""

import time
from collections.abc import Callable, Sequence

from llmkernel.llm.stats import IterationStats
from llmkernel.logger import init_logger
from llmkernel.protocol.stats import SchedulerStats

__all__ = ["StatListener", "StatLogger"]

logger = init_logger("llmkernel.stats")

StatListener = Callable[[SchedulerStats | None, IterationStats | None], None]
"""Called with the statistics of every message of the engine; quick, and on the loop that reads them."""

_INTERVAL = 10.0
"""Seconds between two lines."""


class StatLogger:
    """Sums up what the iterations bring; `record` writes the line when it is due. An idle engine writes none.

    listeners: hear the same; the list is the caller's, and may change.
    """

    def __init__(self, interval: float = _INTERVAL, *, listeners: Sequence[StatListener] = ()) -> None:
        self._interval = interval
        self._listeners = listeners
        self._hits = self._queries = 0
        self._reset(time.monotonic())

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Take in one message's statistics."""
        if iteration_stats is not None:
            self._generated += iteration_stats.num_generation_tokens
            self._prompt += iteration_stats.prompt_token_stats.computed
            self._finished += len(iteration_stats.finished_requests)
        if scheduler_stats is not None and scheduler_stats.prefix_cache_stats is not None:
            self._hits += scheduler_stats.prefix_cache_stats.hits
            self._queries += scheduler_stats.prefix_cache_stats.queries
        for listener in tuple(self._listeners):
            listener(scheduler_stats, iteration_stats)
        now = time.monotonic()
        if scheduler_stats is not None and now - self._since >= self._interval:
            self._log(scheduler_stats, now - self._since)
            self._reset(now)

    def _log(self, stats: SchedulerStats, seconds: float) -> None:
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, running %d, waiting %d, finished %d, KV cache %.1f %%,"
            " prefix cache hits %.1f %%",
            self._prompt / seconds,
            self._generated / seconds,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            self._finished,
            100 * stats.kv_cache_usage,
            100 * self._hits / self._queries if self._queries else 0.0,
        )
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            logger.info(
                "speculation: %d of %d drafted tokens accepted since the start, %.1f %%",
                drafts.num_accepted_tokens,
                drafts.num_draft_tokens,
                100 * drafts.acceptance_rate,
            )

    def _reset(self, now: float) -> None:
        self._since = now
        self._generated = self._prompt = self._finished = 0
