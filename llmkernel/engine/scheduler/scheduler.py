"""Scheduler: which tokens of which request are computed in a step (engine.md part C).

There is no prefill phase and no decode phase. A request has tokens, and a number of them that have their KV computed;
every step hands out one budget of tokens so that the second number catches up with the first. Chunked prefill, prefix
caching and recomputing after preemption are all this one rule.
"""

from collections.abc import Iterable

from llmkernel.engine.kv_cache.manager import CachedPrefix, KVCacheManager
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.admission_gate import AdmissionGate, PauseState
from llmkernel.engine.scheduler.draft_planner import DraftPlanner
from llmkernel.engine.scheduler.grammar_mask_filler import GrammarMaskFiller
from llmkernel.engine.scheduler.outbox import Outbox
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.engine.scheduler.prefill_pacer import PrefillPacer
from llmkernel.engine.scheduler.request_queue import create_request_queue
from llmkernel.engine.scheduler.step_plan import StepPlan
from llmkernel.engine.scheduler.stop import check_stop
from llmkernel.errors import InvalidRequestError
from llmkernel.logger import init_logger
from llmkernel.protocol.outputs import EngineCoreEventType, LogprobsLists
from llmkernel.protocol.stats import SchedulerStats, WaitReason
from llmkernel.speculative_config import SpeculativeConfig

__all__ = ["Scheduler"]

logger = init_logger(__name__)

COMPILING = "its grammar is being compiled"
"""Why a request with a constraint does not queue yet."""


class Scheduler:
    """Owns the live requests. A step is `schedule`, then `update_from_output` or `fail_step`; what clients are to be
    told gathers in `outbox`.

    compiling: requests that wait for their grammar; they queue when it is there, and hold nobody up until then.
    max_num_seqs: most requests that run at once; never more than the budget can give one token each.
    max_model_len: tokens of prompt and output; never more than one request alone has blocks for (the last token of a
    text needs none).
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        stream_interval: int = 1,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = min(max_model_len, kv_cache.capacity + 1)
        self.outbox = Outbox(stream_interval)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = create_request_queue(policy)
        self.compiling: dict[str, Request] = {}
        self.step_counter = 0
        self._gate = AdmissionGate(
            kv_cache, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._masks = GrammarMaskFiller()
        self._drafts = None if speculative is None else DraftPlanner(speculative, kv_cache, self.max_model_len)
        self._num_preempted_waiting = 0
        self._num_skipped = 0
        self._finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        self._wait_reasons: dict[str, str] = {}
        self._last_batched_tokens = 0
        self._last_prompt_tokens = 0
        self._last_decodes = 0
        self._pacer = PrefillPacer(max_num_batched_tokens)
        self._last_preempted = 0

    @property
    def pause_state(self) -> PauseState:
        return self._gate.pause_state

    @pause_state.setter
    def pause_state(self, state: PauseState) -> None:
        self._gate.pause_state = state

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """InvalidRequestError if a live request has the same id."""
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is in use; give each request an id of its own.",
                parameter="request_id",
                value=request.request_id,
            )
        self.requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.compiling[request.request_id] = request
        else:
            self.waiting.add(request)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, stop_reason: str | None = None
    ) -> list[Request]:
        """End live requests from outside (abort, error), at any stage; unknown and ended ids are passed over.

        Their clients get a last output; blocks come back at once; the executor is told with the next step.
        """
        found = [self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        waiting = [request for request in found if request.status is not RequestStatus.RUNNING]
        for request in waiting:
            self.compiling.pop(request.request_id, None)
        if waiting:
            self.waiting.remove(waiting)
            self._num_preempted_waiting -= sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        for request in found:
            request.status = status
            request.stop_reason = stop_reason
            self._release(request)
            self.outbox.post(request)
        self._drop_finished_from_running()
        return found

    def has_requests(self) -> bool:
        """Unfinished requests, or finished ones of which the executor has not been told."""
        return bool(self.requests or self._finished_req_ids or self._preempted_req_ids)

    def has_work(self) -> bool:
        """A step would do something: not so if all that is left is paused."""
        if self._finished_req_ids or self._preempted_req_ids or self._has_compiled():
            return True
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        if self.running or self._num_preempted_waiting:
            return True
        return self.pause_state is PauseState.UNPAUSED and len(self.waiting) > 0

    @property
    def has_begun_requests(self) -> bool:
        """Requests that were admitted once and are not finished."""
        return bool(self.running or self._num_preempted_waiting)

    def why_waiting(self, request: Request) -> str:
        """Why a request that waits was not admitted in the last step, in words; "" if others stood before it."""
        paused = self._gate.why_paused(self._num_preempted_waiting)
        return paused or self._wait_reasons.get(request.request_id, "")

    # A step.

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then waiting ones. Computed counts are advanced at once."""
        self._queue_compiled()
        paused = self.pause_state is PauseState.PAUSED_ALL
        plan = StepPlan(0 if paused else self.max_num_batched_tokens, self._prompt_budget())
        self.kv_cache.begin_step()
        self._schedule_running(plan)
        self._wait_reasons = self._schedule_waiting(plan)
        if self._drafts is not None:
            self._drafts.give(plan, num_running=len(self.running))
        return self._close(plan)

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Take in what a step computed. Outputs of requests that have ended meanwhile are dropped."""
        for request_id in step.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            reason = (step.grammar.errors if step.grammar else {}).get(request_id) or output.errors.get(request_id)
            if reason is not None:
                self._end(request, RequestStatus.FINISHED_ERROR, reason)
                continue
            try:
                self._take_output(request, output, len(step.scheduled_spec_decode_tokens.get(request_id, ())))
            except Exception as error:
                logger.exception("The output of request %s could not be taken in", request_id)
                if request_id not in self.requests:
                    raise
                self._end(request, RequestStatus.FINISHED_ERROR, f"{type(error).__name__}: {error}")
        self._drop_finished_from_running()

    def take_step_time(self, seconds: float) -> None:
        """What the last step took, from plan to outputs: how much of a prompt is read beside decodes hangs on it."""
        self._pacer.observe(decodes=self._last_decodes, prompt_tokens=self._last_prompt_tokens, seconds=seconds)

    def fail_step(self, step: SchedulerOutput, reason: str) -> None:
        """The step raised: its requests end with an error, the others go on.

        The executor may have raised before it read who had finished or lost its blocks, so that is told again.
        """
        if step.num_scheduled_tokens:
            self._finished_req_ids |= step.finished_req_ids
            self._preempted_req_ids |= step.preempted_req_ids & self.requests.keys()
        self.finish_requests(step.num_scheduled_tokens, RequestStatus.FINISHED_ERROR, reason)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefixes. False while requests hold blocks, unless these are to be preempted for it."""
        if reset_running_requests:
            for request in reversed(self.running.copy()):
                self._preempt(request)
        return self.kv_cache.reset_prefix_cache()

    def make_stats(self, step_time: float, *, total_cache_stats: bool = False) -> SchedulerStats:
        """The state after a step that took `step_time` seconds; prefix look-ups since the last call, or in total."""
        kv_cache, pool = self.kv_cache, self.kv_cache.pool
        cache_stats = None
        if kv_cache.enable_caching:
            cache_stats = kv_cache.total_stats if total_cache_stats else kv_cache.take_stats()
        waiting_head = None
        if self._wait_reasons and len(self.waiting):
            waiting_head = WaitReason(self.waiting.peek().request_id, next(iter(self._wait_reasons.values())))
        elif self.compiling and not len(self.waiting):
            waiting_head = WaitReason(next(iter(self.compiling)), COMPILING)
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting) + len(self.compiling),
            num_skipped_waiting_reqs=self._num_skipped,
            step_counter=self.step_counter,
            kv_cache_usage=pool.usage,
            prefix_cache_stats=cache_stats,
            step_time=step_time,
            num_batched_tokens=self._last_batched_tokens,
            num_preempted=self._last_preempted,
            num_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            waiting_head=waiting_head,
            spec_decoding_stats=None if self._drafts is None else self._drafts.stats(),
        )

    # Grammars.

    def _has_compiled(self) -> bool:
        return any(request.structured.is_compiled for request in self.compiling.values() if request.structured)

    def _queue_compiled(self) -> None:
        """Requests whose grammar is there wait with the others; those whose grammar has failed end here."""
        for request in [one for one in self.compiling.values() if one.structured and one.structured.is_compiled]:
            assert request.structured is not None
            del self.compiling[request.request_id]
            request.structured.start()
            if request.structured.error is not None:
                self._end(request, RequestStatus.FINISHED_ERROR, request.structured.error)
            else:
                request.status = RequestStatus.WAITING
                self.waiting.add(request)

    # Planning.

    def _prompt_budget(self) -> int | None:
        """Tokens of long prompts that this step may read; None: no bound but the whole."""
        reading = sum(request.reads_prompt for request in self.running)
        return self._pacer.limit(reading + len(self.waiting)) if reading < len(self.running) else None

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in self.running.copy():
            if plan.budget <= 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            num_tokens = plan.room(request)
            if num_tokens == 0:
                continue
            block_ids = self._allocate_or_preempt(request, num_tokens, plan)
            if block_ids is not None:
                plan.add_running(request, num_tokens, block_ids)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Ids of new blocks, at the cost of other running requests if need be; None if it is itself the victim."""
        while (block_ids := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            victim = self.waiting.select_victim(self.running)
            self._preempt(victim)
            plan.give_back(victim)
            if victim is request:
                return None
        return block_ids

    def _schedule_waiting(self, plan: StepPlan) -> dict[str, str]:
        """Admit what fits; returns why those that were looked at still wait, in words, in the order of the queue."""
        skipped: list[Request] = []
        reasons: dict[str, str] = {}
        while len(self.waiting) and self._may_skip_more(len(skipped)):
            request = self.waiting.peek()
            reason = self._gate.why_closed(
                plan, num_running=len(self.running), num_preempted_waiting=self._num_preempted_waiting
            )
            if reason is not None:
                reasons[request.request_id] = reason
                break
            prefix = self.kv_cache.find_prefix(request)
            reason = self._gate.why_skipped(request, prefix, plan)
            if reason is not None:
                reasons[request.request_id] = reason
                skipped.append(self.waiting.pop())
                continue
            reason = self._gate.why_too_large(request, prefix, num_running=len(self.running))
            if reason is not None:
                reasons[request.request_id] = reason
                break
            self._admit(self.waiting.pop(), prefix, plan)
        self.waiting.requeue(skipped)
        self._num_skipped = len(skipped)
        return reasons

    def _may_skip_more(self, num_skipped: int) -> bool:
        """A bound on the work for a long queue; while paused, the few that may run can stand anywhere in it."""
        return num_skipped < self.max_num_seqs or self.pause_state is PauseState.PAUSED_NEW

    def _admit(self, request: Request, prefix: CachedPrefix, plan: StepPlan) -> None:
        self.kv_cache.adopt_prefix(request, prefix)
        num_tokens = plan.room(request)
        self.kv_cache.allocate_slots(request, num_tokens)
        resumed = request.status is RequestStatus.PREEMPTED
        self._num_preempted_waiting -= resumed
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = prefix.num_tokens
        request.status = RequestStatus.RUNNING
        request.record_event(EngineCoreEventType.SCHEDULED, prefix.num_tokens)
        self.running.append(request)
        request.known_to_worker = True
        plan.add_admitted(request, num_tokens, self.kv_cache.block_ids(request), resumed=resumed)

    def _preempt(self, request: Request) -> None:
        """Recompute later: blocks go back, output tokens are kept."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.record_event(EngineCoreEventType.PREEMPTED)
        self._preempted_req_ids.add(request.request_id)
        self._num_preempted_waiting += 1
        self.waiting.requeue([request])

    def _close(self, plan: StepPlan) -> SchedulerOutput:
        step = plan.build(self._finished_req_ids, self._preempted_req_ids)
        self._finished_req_ids, self._preempted_req_ids = set(), set()
        for request in plan.requests():
            request.num_computed_tokens += step.num_scheduled_tokens[request.request_id]
        step.grammar = self._masks.fill(plan)
        self.step_counter += 1
        self._last_batched_tokens = step.total_num_scheduled_tokens
        self._last_prompt_tokens = plan.num_prompt_tokens
        self._last_decodes = plan.num_decodes
        self._last_preempted = len(step.preempted_req_ids)
        return step

    # Taking in.

    def _take_output(self, request: Request, output: ModelRunnerOutput, num_drafts: int) -> None:
        request_id = request.request_id
        if request.is_prefill_chunk:
            self.kv_cache.commit(request)
            request.record_chunk()
            return
        request.unsent_prompt_logprobs = output.prompt_logprobs.get(request_id, request.unsent_prompt_logprobs)
        token_ids = output.sampled_token_ids.get(request_id)
        if not token_ids:
            self._end(request, RequestStatus.FINISHED_ERROR, "The executor returned no token for this request.")
            return
        num_taken = self._take_tokens(request, token_ids, output.logprobs.get(request_id))
        if self._drafts is not None and num_drafts:
            self._drafts.record(request, num_drafts, num_accepted=min(num_taken, len(token_ids) - 1))
        self.kv_cache.commit(request)
        if request.is_finished:
            self._release(request)
        self.outbox.post(request)

    def _take_tokens(self, request: Request, token_ids: list[int], logprobs: LogprobsLists | None) -> int:
        """Returns how many of the tokens were taken: a stop cuts the rest off.

        Only what stands before the last token has its KV: drafts that were rejected are not computed any more.
        """
        before = request.num_output_tokens
        for token_id in token_ids:
            request.append_output_token(token_id)
            if check_stop(request, self.max_model_len):
                break
        num_taken = request.num_output_tokens - before
        if logprobs is not None:
            request.unsent_logprobs.append(_first_positions(logprobs, num_taken))
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return num_taken

    def _end(self, request: Request, status: RequestStatus, reason: str) -> None:
        request.status = status
        request.stop_reason = reason
        self._release(request)
        self.outbox.post(request)

    def _release(self, request: Request) -> None:
        """The request is finished: blocks back, forget it, tell the executor if it ever saw it."""
        self.kv_cache.free(request)
        del self.requests[request.request_id]
        if request.known_to_worker:
            self._finished_req_ids.add(request.request_id)

    def _drop_finished_from_running(self) -> None:
        if any(request.is_finished for request in self.running):
            self.running = [request for request in self.running if not request.is_finished]


def _first_positions(logprobs: LogprobsLists, count: int) -> LogprobsLists:
    """Those of the first `count` tokens: a stop may have cut the rest off."""
    if len(logprobs.sampled_token_ranks) == count:
        return logprobs
    return LogprobsLists(
        logprobs.logprob_token_ids[:count], logprobs.logprobs[:count], logprobs.sampled_token_ranks[:count]
    )
