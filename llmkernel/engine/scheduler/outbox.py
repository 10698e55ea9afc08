"""Outbox: what the clients have still to be told."""

import math
import time

import numpy as np

from llmkernel.engine.request import Request
from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, LogprobsLists
from llmkernel.protocol.stats import PrefillStats, SchedulerStats

__all__ = ["Outbox"]


class Outbox:
    """Outputs by client, until the step's end takes them. Decides, too, how often a stream is told of its tokens.

    stream_interval: a request is told of its first token, then of every k-th, then of its end, where k is the larger of
    this and its own. include_finished: name the finished requests besides, for clients that balance several engines.
    owner: client_index of the owner, who hears the statistics when there is nothing else to say.
    pace: seconds after telling something for which further tokens of running requests may wait, so that the tokens of
    several steps travel together; requests with a stream_interval of their own are not made to wait. 0: nobody is.
    """

    def __init__(self, stream_interval: int = 1, *, include_finished: bool = False) -> None:
        self._stream_interval = stream_interval
        self._include_finished = include_finished
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._patient: dict[str, Request] = {}  # that have tokens which may wait for more
        self._told_at = -math.inf
        self.owner = 0
        self.pace = 0.0

    def __bool__(self) -> bool:
        return bool(self._outputs or self._patient)

    def post(self, request: Request) -> None:
        """The request has new tokens or has ended; tell its client, if it is time."""
        if not request.is_finished and not self._is_due(request):
            return
        if self._is_patient(request):
            self._patient[request.request_id] = request
        else:
            self._patient.pop(request.request_id, None)
            self._say(request)

    def may_wait(self, now: float) -> bool:
        """There is nothing to tell but tokens that may wait, and what was told last is not `pace` ago yet."""
        return bool(self._patient) and not self._outputs and now - self._told_at < self.pace

    def refuse(self, client_index: int, request_id: str, reason: str) -> None:
        """A request that never became one ends with an error."""
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        self._outputs.setdefault(client_index, []).append(output)

    def take(self, stats: SchedulerStats | None = None, now: float | None = None) -> dict[int, EngineCoreOutputs]:
        """Everything, by client. `stats` go to one client: one that is told something anyway, else the owner.

        now: time.monotonic(); the messages are stamped with it.
        """
        self._told_at = now = time.monotonic() if now is None else now
        for request in self._patient.values():
            self._say(request)
        taken = {client: EngineCoreOutputs(outputs=outputs, timestamp=now) for client, outputs in self._outputs.items()}
        self._outputs, self._patient = {}, {}
        if self._include_finished:
            for message in taken.values():
                message.finished_requests = {o.request_id for o in message.outputs if o.finished} or None
        if stats is not None:
            if not taken:
                taken[self.owner] = EngineCoreOutputs(timestamp=now)
            next(iter(taken.values())).scheduler_stats = stats
        return taken

    def _say(self, request: Request) -> None:
        first = not request.prefill_told and request.num_output_tokens > 0
        output = EngineCoreOutput(
            request.request_id,
            request.unsent_token_ids,
            new_logprobs=_joined(request.unsent_logprobs),
            new_prompt_logprobs_tensors=request.unsent_prompt_logprobs,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            prefill_stats=_prefill_stats(request) if first else None,
        )
        request.prefill_told = request.prefill_told or first
        request.unsent_token_ids, request.unsent_logprobs, request.unsent_prompt_logprobs = [], [], None
        self._outputs.setdefault(request.client_index, []).append(output)

    def _is_due(self, request: Request) -> bool:
        unsent = len(request.unsent_token_ids)
        if unsent == 0:
            return False
        nothing_sent = unsent == request.num_output_tokens
        return nothing_sent or unsent >= max(self._stream_interval, request.stream_interval or 1)

    def _is_patient(self, request: Request) -> bool:
        """All it has to tell is a further token, and nobody said how often to tell of those."""
        free = self._stream_interval == 1 and request.stream_interval is None
        return self.pace > 0 and free and request.prefill_told and not request.is_finished


def _prefill_stats(request: Request) -> PrefillStats:
    cached = max(request.num_cached_tokens, 0)
    return PrefillStats(request.num_prompt_tokens, cached, request.num_prompt_tokens - cached)


def _joined(parts: list[LogprobsLists]) -> LogprobsLists | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )
