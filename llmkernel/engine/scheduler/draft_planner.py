"""DraftPlanner: who gets drafts in a step, and what became of them (engine.md C.10)."""

import msgspec

from llmkernel.engine.kv_cache.manager import KVCacheManager
from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.step_plan import StepPlan
from llmkernel.engine.speculative.drafting import Drafting
from llmkernel.protocol.stats import SpecDecodingStats
from llmkernel.speculative_config import SpeculativeConfig

__all__ = ["DraftPlanner"]

LEAST_PROMISE = 0.25
"""Tokens that the drafts of a step must promise for each further request in it, which waits while they are computed.

Measured on two cores: a step of four or eight requests takes 5 to 25 % longer as soon as one of them has a draft.
"""


MOST_DRAFTED_ROWS = 256
"""Drafts of a step, at most: the logits behind every one of them are needed, 155 MB for a vocabulary of 152,000."""


class DraftPlanner:
    """Drafts take what a planned step leaves of its budget and of the free blocks: they make nobody wait.

    They live for one step, so nothing of them is left when a request ends or is preempted. Every kind of request gets
    drafts, for every position is drawn as it would have been without them; with a grammar, as far as that allows them.
    """

    def __init__(self, config: SpeculativeConfig, kv_cache: KVCacheManager, max_model_len: int) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._totals = SpecDecodingStats()

    def give(self, plan: StepPlan, *, num_running: int) -> None:
        """Add drafts to the plan, whose requests have their own tokens in it."""
        if num_running > self._config.disable_by_batch_size:
            return
        decoding = plan.decoding()
        offers = [(request, drafts) for request in decoding if (drafts := self._propose(request))]
        if sum(_promise(request, drafts) for request, drafts in offers) < LEAST_PROMISE * (len(decoding) - 1):
            return
        left = min(plan.budget, MOST_DRAFTED_ROWS)
        for request, offered in offers:
            drafts = offered[:left]
            block_ids = self._kv_cache.allocate_slots(request, 1 + len(drafts)) if drafts else None
            if block_ids is not None:
                plan.add_drafts(request, drafts, block_ids)
                left -= len(drafts)

    def record(self, request: Request, num_drafted: int, *, num_accepted: int) -> None:
        """Of the drafts that a request got in this step, so many are text now."""
        self._totals.num_drafts += 1
        self._totals.num_draft_tokens += num_drafted
        self._totals.num_accepted_tokens += num_accepted
        if request.drafting is not None:
            request.drafting.pace.record(num_drafted, num_accepted, request.num_tokens)

    def stats(self) -> SpecDecodingStats:
        """The totals until now."""
        return msgspec.structs.replace(self._totals)

    def _propose(self, request: Request) -> list[int]:
        """Never more than could be taken beside the one token that comes anyway."""
        room = self._max_model_len - request.num_tokens - 1
        if request.max_tokens is not None:
            room = min(room, request.max_tokens - request.num_output_tokens - 1)
        if request.drafting is None:
            request.drafting = Drafting(self._config)
        drafts = request.drafting.propose(request.all_token_ids, room)
        return request.structured.allowed_drafts(drafts) if request.structured is not None else drafts


def _promise(request: Request, drafts: list[int]) -> float:
    """Of these drafts so many will be accepted, if it goes on as it went."""
    return 0.0 if request.drafting is None else min(request.drafting.pace.average, len(drafts))
