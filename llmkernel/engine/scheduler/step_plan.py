"""StepPlan: one step while it is being scheduled."""

from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from llmkernel.engine.scheduler.prefill_pacer import SHORT_PROMPT

__all__ = ["StepPlan"]


PROMPT_LOGPROBS_BUDGET = 256
"""Prompt tokens of a step whose logits are all needed: 256 rows of 152,000 floats are 155 MB."""


class StepPlan:
    """Who gets how many tokens, and what is left of the step's one token budget.

    prompt_budget: what is left of it for prompts while others decode (PrefillPacer); short ones have a budget of their
    own then, of one such prompt. prompt_logprobs_budget: what is left for the prompts of requests that want their
    logprobs, which cost memory.
    new: run for the first time, with all their block ids. resumed: the same after preemption. running: with the ids of
    the blocks added in this step. preempted: lost their blocks while this step was planned.
    """

    def __init__(self, token_budget: int, prompt_budget: int | None = None) -> None:
        self.budget = token_budget
        self.prompt_budget = token_budget if prompt_budget is None else prompt_budget
        self.short_prompt_budget = token_budget if prompt_budget is None else max(SHORT_PROMPT, prompt_budget)
        self.num_prompt_tokens = 0
        self._prompts: set[str] = set()
        self.prompt_logprobs_budget = min(PROMPT_LOGPROBS_BUDGET, token_budget)
        self.preempted: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self._requests: dict[str, Request] = {}
        self._new: dict[str, list[int]] = {}
        self._resumed: dict[str, list[int]] = {}
        self._running: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Requests that get tokens."""
        return len(self._requests)

    @property
    def num_decodes(self) -> int:
        """Requests that get the token after their last one, drafts perhaps behind it."""
        return len(self._requests) - len(self._prompts)

    def room(self, request: Request) -> int:
        """How many of its tokens without KV the request can get."""
        room = min(request.num_tokens - request.num_computed_tokens, self.budget)
        if request.reads_prompt:
            room = min(room, self.short_prompt_budget if _is_short(request) else self.prompt_budget)
        return min(room, self.prompt_logprobs_budget) if request.needs_prompt_logprobs else room

    def add_running(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        self._running[request.request_id] = new_block_ids
        self._count(request, num_tokens)

    def add_admitted(self, request: Request, num_tokens: int, block_ids: list[int], *, resumed: bool) -> None:
        (self._resumed if resumed else self._new)[request.request_id] = block_ids
        self._count(request, num_tokens)

    def give_back(self, request: Request) -> None:
        """The request is preempted: what it was to get in this step goes back to the budget."""
        self.preempted.append(request)
        if self._requests.pop(request.request_id, None) is not None:
            self._spend(request, -self.num_scheduled_tokens.pop(request.request_id))
            self._prompts.discard(request.request_id)
            self._running.pop(request.request_id)

    def decoding(self) -> list[Request]:
        """Running requests that get their last token alone: drafts may follow it."""
        return [
            request
            for request_id in self._running
            if (request := self._requests[request_id]).num_output_tokens
            and request.num_computed_tokens == request.num_tokens - 1
        ]

    def add_drafts(self, request: Request, token_ids: list[int], new_block_ids: list[int]) -> None:
        """Tokens to compute behind the request's own, one of which it gets already."""
        self._drafts[request.request_id] = token_ids
        self._running[request.request_id] += new_block_ids
        self.num_scheduled_tokens[request.request_id] += len(token_ids)
        self._spend(request, len(token_ids))

    def drafts(self, request: Request) -> list[int]:
        return self._drafts.get(request.request_id, [])

    def requests(self) -> list[Request]:
        """Those that get tokens."""
        return list(self._requests.values())

    def build(self, finished_req_ids: set[str], preempted_req_ids: set[str]) -> SchedulerOutput:
        """What the executor is told. Call it before the computed counts are advanced."""
        return SchedulerOutput(
            scheduled_new_reqs=[self._new_data(request_id, ids) for request_id, ids in self._new.items()],
            scheduled_cached_reqs=self._cached_data(),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids,
            scheduled_spec_decode_tokens=self._drafts,
        )

    def _count(self, request: Request, num_tokens: int) -> None:
        self._requests[request.request_id] = request
        if request.reads_prompt:
            self._prompts.add(request.request_id)
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self._spend(request, num_tokens)

    def _spend(self, request: Request, num_tokens: int) -> None:
        self.budget -= num_tokens
        if request.request_id in self._prompts:
            self.num_prompt_tokens += num_tokens
            if _is_short(request):
                self.short_prompt_budget -= num_tokens
            else:
                self.prompt_budget -= num_tokens
        if request.needs_prompt_logprobs:
            self.prompt_logprobs_budget -= num_tokens

    def _new_data(self, request_id: str, block_ids: list[int]) -> NewRequestData:
        request = self._requests[request_id]
        return NewRequestData(
            req_id=request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            eos_token_id=request.eos_token_id,
            bad_words_token_ids=request.bad_words_token_ids,
        )

    def _cached_data(self) -> CachedRequestData:
        blocks = self._running | self._resumed
        requests = [self._requests[request_id] for request_id in blocks]
        return CachedRequestData(
            req_ids=list(blocks),
            resumed_req_ids=set(self._resumed),
            new_block_ids=list(blocks.values()),
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[request.num_output_tokens for request in requests],
        )


def _is_short(request: Request) -> bool:
    return request.num_tokens <= SHORT_PROMPT
