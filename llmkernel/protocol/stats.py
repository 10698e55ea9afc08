"""Statistics that travel with the outputs (the engine's side of engine.md B.17)."""

import msgspec

__all__ = ["PrefillStats", "PrefixCacheStats", "SchedulerStats", "WaitReason"]


class PrefillStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """How a prompt was read. Tokens: prompt, taken from the prefix cache, computed."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0


class PrefixCacheStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Prefix-cache look-ups since the last message. queries, hits: tokens; preempted_*: those of resumed requests."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class WaitReason(msgspec.Struct, array_like=True, gc=False):
    """Why the request at the head of the waiting queue is not running: "needs 12 blocks, 9 free"."""

    request_id: str
    reason: str


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The engine's state after a step, for one of its clients.

    kv_cache_usage: 0 to 1. step_time: seconds of the last step. num_preempted: preemptions in the last step.
    num_batched_tokens: tokens computed in the last step. waiting_head: why the queue does not move, if it does not.
    num_threads: the worker's threads in the last step; 0 where they are not counted.
    Fields up to prefix_cache_stats carry vLLM's names.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None
    step_time: float = 0.0
    num_batched_tokens: int = 0
    num_preempted: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    waiting_head: WaitReason | None = None
    num_threads: int = 0
