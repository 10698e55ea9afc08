"""Times and counts, measured where the text appears (engine.md B.17).

Two clocks: `arrival_time` and latencies from it are wall clock of this process; `*_ts` are the engine's monotonic
clock. The two are never subtracted from each other; RequestWay knows how far the monotonic clocks are apart.
"""

import time
from dataclasses import dataclass, field

from llmkernel.llm.request_way import RequestWay
from llmkernel.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from llmkernel.protocol.stats import PrefillStats

__all__ = ["FinishedRequestStats", "IterationStats", "PromptTokenStats", "RequestStateStats"]


@dataclass(slots=True)
class RequestStateStats:
    """One request's life so far; grows until it is finished. Seconds; 0.0 = did not happen yet.

    arrival_time: wall clock. queued_ts, scheduled_ts, first_token_ts, last_token_ts: the engine's clock.
    first_token_latency: from arrival to the first token here. last_token_latency: the same of the newest token.
    way: the finer hops.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    last_token_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    way: RequestWay = field(default_factory=RequestWay)

    @property
    def queue_time(self) -> float:
        """Seconds in the engine's waiting queue, before the first step."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else 0.0

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_latency

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the newest."""
        return self.last_token_ts - self.first_token_ts if self.first_token_ts else 0.0

    @property
    def inter_token_latency(self) -> float:
        """Mean seconds between two tokens; 0.0 with fewer than two."""
        return self.decode_time / (self.num_generation_tokens - 1) if self.num_generation_tokens > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, per second of decoding; 0.0 with fewer than two."""
        return (self.num_generation_tokens - 1) / self.decode_time if self.decode_time > 0 else 0.0


@dataclass(slots=True)
class FinishedRequestStats:
    """What a request took, in seconds: e2e_latency by the wall clock from arrival, the rest by the engine's clock."""

    finish_reason: FinishReason
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class PromptTokenStats:
    """Prompt tokens of requests whose prefill ended in this iteration: computed, found in the cache, all."""

    computed: int = 0
    local_cache_hit: int = 0
    external: int = 0
    total: int = 0

    @property
    def cached(self) -> int:
        return self.local_cache_hit + self.external

    def add(self, prefill: PrefillStats) -> None:
        self.computed += prefill.num_computed_tokens
        self.local_cache_hit += prefill.num_cached_tokens
        self.total += prefill.num_prompt_tokens


@dataclass(slots=True)
class IterationStats:
    """What one EngineCoreOutputs message brought, over all its requests.

    pushed_ts: when the engine encoded it, by its clock. received_ts: when it was taken here, by ours.
    """

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    pushed_ts: float = 0.0
    received_ts: float = 0.0

    @classmethod
    def of(cls, outputs: EngineCoreOutputs) -> "IterationStats":
        """Those of a message that is taken now."""
        return cls(pushed_ts=outputs.pushed or 0.0, received_ts=time.monotonic())

    def update_from_output(self, output: EngineCoreOutput, engine_timestamp: float, stats: RequestStateStats) -> None:
        """Account for one request's output; `engine_timestamp` is that of the message it came in."""
        if output.events:
            self._update_from_events(output.events, stats)
        if output.prefill_stats is not None:
            stats.num_prompt_tokens = output.prefill_stats.num_prompt_tokens
            stats.num_cached_tokens = output.prefill_stats.num_cached_tokens
            self.prompt_token_stats.add(output.prefill_stats)
        count = len(output.new_token_ids)
        if not count:
            return
        self.num_generation_tokens += count
        stats.last_token_latency = self.iteration_timestamp - stats.arrival_time
        if stats.num_generation_tokens == 0:
            stats.first_token_latency = stats.last_token_latency
            stats.first_token_ts = engine_timestamp
            stats.way.pushed, stats.way.received = self.pushed_ts, self.received_ts
            self.time_to_first_tokens_iter.append(stats.first_token_latency)
        else:
            self.inter_token_latencies_iter.append((engine_timestamp - stats.last_token_ts) / count)
        stats.num_generation_tokens += count
        stats.last_token_ts = engine_timestamp

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        stats: RequestStateStats,
        *,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        n: int = 1,
    ) -> None:
        """A request is through: its times go into `finished_requests`."""
        prefill = stats.first_token_ts - stats.scheduled_ts if stats.first_token_ts and stats.scheduled_ts else 0.0
        inference = stats.last_token_ts - stats.scheduled_ts if stats.last_token_ts and stats.scheduled_ts else 0.0
        self.max_num_generation_tokens_iter.append(stats.num_generation_tokens)
        self.n_params_iter.append(n)
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                e2e_latency=self.iteration_timestamp - stats.arrival_time,
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=stats.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=stats.queue_time,
                prefill_time=prefill,
                inference_time=inference,
                decode_time=stats.decode_time,
                mean_time_per_output_token=stats.inter_token_latency,
                num_cached_tokens=stats.num_cached_tokens,
                num_preemptions=stats.num_preemptions,
            )
        )

    def _update_from_events(self, events: list[EngineCoreEvent], stats: RequestStateStats) -> None:
        stats.way.take(events)
        for event in events:
            if event.type == EngineCoreEventType.QUEUED:
                stats.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp
            elif event.type == EngineCoreEventType.PREEMPTED:
                stats.num_preemptions += 1
                self.num_preempted_reqs += 1
