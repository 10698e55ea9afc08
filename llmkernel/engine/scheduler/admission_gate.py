"""AdmissionGate: whether a waiting request may run, and if not, why, in words that a user understands."""

import enum

from llmkernel.engine.kv_cache.manager import CachedPrefix, KVCacheManager
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.step_plan import StepPlan

__all__ = ["AdmissionGate", "PauseState"]

WATERMARK = 0.01
"""Share of the pool that stays free at an admission, so that those who run can grow. Not while nobody runs."""


class PauseState(enum.IntEnum):
    """What may be scheduled (engine.md B.13)."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Only requests that have begun, preempted ones included."""
    PAUSED_ALL = 2
    """Nothing."""


class AdmissionGate:
    """Every answer is None, or the reason: "needs 12 blocks, 9 free". Who is alone always passes `why_too_large`."""

    def __init__(self, kv_cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pause_state = PauseState.UNPAUSED
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark = int(WATERMARK * kv_cache.pool.num_usable_blocks)

    def why_paused(self, num_preempted_waiting: int) -> str | None:
        """Nobody who waits may run until the engine is resumed; known between steps, too."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return "the engine is paused"
        if self.pause_state is PauseState.PAUSED_NEW and not num_preempted_waiting:
            return "the engine is paused for new requests"
        return None

    def why_closed(self, plan: StepPlan, *, num_running: int, num_preempted_waiting: int) -> str | None:
        """Reasons that hold for every waiting request."""
        if (reason := self.why_paused(num_preempted_waiting)) is not None:
            return reason
        if plan.preempted:
            return f"KV memory is short, {len(plan.preempted)} preempted in this step"
        if num_running >= self._max_num_seqs:
            run = "1 request runs" if num_running == 1 else f"{num_running} requests run"
            return f"{run}, the most at once (max_num_seqs)"
        if plan.budget <= 0:
            return f"prefill budget used ({self._max_num_batched_tokens} tokens a step)"
        return None

    def why_skipped(self, request: Request, prefix: CachedPrefix, plan: StepPlan) -> str | None:
        """Reasons that hold one request back in this step and let those behind it pass."""
        if self.pause_state is PauseState.PAUSED_NEW and request.status is not RequestStatus.PREEMPTED:
            return "the engine is paused for new requests"
        if not plan.room(request):
            return "another prompt is read first, in pieces, as others decode"
        if prefix.being_computed:
            return "shares a prefix that is being computed in this step"
        if request.needs_prompt_logprobs and plan.prompt_logprobs_budget <= 0:
            return "other prompts have their logprobs computed in this step"
        return None

    def why_too_large(self, request: Request, prefix: CachedPrefix, *, num_running: int) -> str | None:
        """There must be blocks for the whole sequence as it stands."""
        needed = self._kv_cache.blocks_missing(request, prefix)
        free = self._kv_cache.pool.num_free_blocks
        kept = self._watermark if num_running else 0
        if needed + kept <= free:
            return None
        also = f" ({kept} kept for running requests)" if needed <= free else ""
        return f"needs {needed} blocks, {free} free{also}"
