"""Statistics that travel with the outputs (the engine's side of engine.md B.17)."""

import msgspec

__all__ = ["PrefillStats", "PrefixCacheStats", "RequestProgress", "SchedulerStats", "SpecDecodingStats", "WaitReason"]


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


class RequestProgress(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Where a request stands that brings no tokens: it waits, or its text is being read. Told when somebody asks.

    position: its place among all that wait, 1 = next; 0: it runs. reason: why the last step did not admit it, "" if
    others stood before it. num_computed_tokens of num_tokens have been read (prompt, and after a preemption the answer
    so far), num_cached_tokens of them from the prefix cache.
    """

    request_id: str
    position: int
    reason: str = ""
    num_computed_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class WaitReason(msgspec.Struct, array_like=True, gc=False):
    """Why the request at the head of the waiting queue is not running: "needs 12 blocks, 9 free"."""

    request_id: str
    reason: str


class SpecDecodingStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Drafts since the engine's start (vLLM's names, totals here: a newer message says it all).

    num_drafts: times that a request got drafts. num_draft_tokens, num_accepted_tokens: tokens in them, and those of
    them that became text.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted, 0 to 1."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The engine's state after a step, for one of its clients.

    kv_cache_usage: 0 to 1. step_time: seconds of the last step. num_preempted: preemptions in the last step.
    num_batched_tokens: tokens computed in the last step. waiting_head: why the queue does not move, if it does not.
    num_threads: the worker's threads in the last step; 0 where they are not counted. spec_decoding_stats: None without
    speculation.
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
    spec_decoding_stats: SpecDecodingStats | None = None
