"""EngineHistory: what an engine did over time, from the statistics that travel with its outputs, and nothing else."""

from collections import deque

from llmkernel.llm.stats import IterationStats
from llmkernel.notebook.widgets.messages import EngineSample
from llmkernel.protocol.stats import SchedulerStats

__all__ = ["EngineHistory"]

KEPT_SAMPLES = 480
_KEPT_LOOKUPS = 40
"""Samples over which the prefix-cache hit rate is taken: about ten seconds."""


class EngineHistory:
    """Sums up statistics between two samples. Times are of the caller's monotonic clock, in seconds."""

    def __init__(self, started: float) -> None:
        self.samples: deque[EngineSample] = deque(maxlen=KEPT_SAMPLES)
        self._started = self._sampled = started
        self._stats = SchedulerStats()
        self._tokens_in = self._tokens_out = self._preemptions = 0
        self._lookups: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_KEPT_LOOKUPS)
        self._cpu_seconds: float | None = None

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Take in the statistics of one message of the engine."""
        if iteration_stats is not None:
            self._tokens_out += iteration_stats.num_generation_tokens
            self._tokens_in += iteration_stats.prompt_token_stats.total
        if scheduler_stats is None:
            return
        self._stats = scheduler_stats
        self._preemptions += scheduler_stats.num_preempted
        cache = scheduler_stats.prefix_cache_stats
        if cache is not None:
            hits, queries = self._lookups[-1]
            self._lookups[-1] = hits + cache.hits, queries + cache.queries

    def sample(self, now: float, *, memory: int, cpu_seconds: float) -> EngineSample:
        """The time since the last sample as one point. memory: bytes; cpu_seconds: of the engine since its start."""
        seconds = max(now - self._sampled, 1e-6)
        used = cpu_seconds - self._cpu_seconds if self._cpu_seconds is not None else 0.0
        hits = sum(hits for hits, _ in self._lookups)
        queries = sum(queries for _, queries in self._lookups)
        sample = EngineSample(
            time=now - self._started,
            running=self._stats.num_running_reqs,
            waiting=self._stats.num_waiting_reqs,
            tokens_in=self._tokens_in / seconds,
            tokens_out=self._tokens_out / seconds,
            kv_usage=self._stats.kv_cache_usage,
            hit_rate=hits / queries if queries else 0.0,
            preemptions=self._preemptions,
            step_time=self._stats.step_time,
            memory=memory,
            cpu=used / seconds,
            threads=self._stats.num_threads,
        )
        self._sampled, self._cpu_seconds = now, cpu_seconds
        self._tokens_in = self._tokens_out = 0
        self._lookups.append((0, 0))
        self.samples.append(sample)
        return sample
