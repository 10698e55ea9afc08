"""OutputProcessor: from EngineCoreOutputs to the RequestOutputs of each request."""

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmkernel.errors import EngineDeadError, RequestFailedError
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.request_state import RequestState
from llmkernel.llm.stats import IterationStats, RequestStateStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.logger import init_logger
from llmkernel.protocol.outputs import EngineCoreOutput, FinishReason
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.stats import SchedulerStats

__all__ = ["OutputProcessor", "OutputProcessorOutput"]

logger = init_logger(__name__)


@dataclass(slots=True)
class OutputProcessorOutput:
    """request_outputs: of requests without a queue. reqs_to_abort: ended here, by a stop string or a fault."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Registry of the running requests, by internal id: splits what the engine sends, decodes, finds stop strings, and
    delivers to each request's queue. No I/O; used from one thread at a time.

    A fault while one request is processed fails that request alone. scheduler_stats: the newest that the engine sent.
    clock_offset: see RequestWay, for requests that are added from now on.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, log_stats: bool = True, stream_interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.scheduler_stats: SchedulerStats | None = None
        self.clock_offset = 0.0
        self._external: dict[str, list[str]] = {}  # external id -> internal ids
        self._children: dict[str, list[str]] = {}  # internal id of a parent -> internal ids

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> RequestState:
        """Register a request before it is sent. External ids may repeat, internal ones may not."""
        request_id = request.request_id
        if request_id in self.request_states:
            raise ValueError(f"Request id {request_id} already running.")
        state = RequestState.from_new_request(
            self.tokenizer, request, prompt, parent_req, request_index, queue, self.log_stats, self.stream_interval
        )
        if state.stats is not None:
            state.stats.way.clock_offset = self.clock_offset
        self.request_states[request_id] = state
        self._external.setdefault(state.external_req_id, []).append(request_id)
        if parent_req is not None:
            self._children.setdefault(parent_req.request_id, []).append(request_id)
        return state

    def process_outputs(
        self,
        engine_core_outputs: Sequence[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Process what a step brought; unknown ids (aborted meanwhile) are skipped.

        The only place that may loop over a whole batch. engine_core_timestamp: needed with iteration_stats.
        """
        result = OutputProcessorOutput()
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            try:
                self._process(state, output, engine_core_timestamp, iteration_stats, result)
            except Exception as error:  # noqa: BLE001 - whatever went wrong with this request must not reach the others
                self._fail(state, error, result)
        return result

    def internal_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The internal ids of the running requests that these external ids mean. From any thread."""
        return [found for request_id in request_ids for found in self._internal_ids(request_id, internal=False)]

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        self.scheduler_stats = scheduler_stats or self.scheduler_stats

    def abort_requests(self, request_ids: Iterable[str], *, internal: bool = False) -> list[str]:
        """End requests here, each with a last output that says "abort"; the ids to abort in the engine.

        An external id means all requests that carry it, a parent's id its children. internal: the ids are internal.
        """
        aborted = []
        for request_id in request_ids:
            for internal_id in self._internal_ids(request_id, internal):
                state = self.request_states[internal_id]
                self._forget(state)
                aborted.append(internal_id)
                state.detokenizer.flush()
                self._deliver(state, state.make_request_output([], finish_reason=FinishReason.ABORT), None)
        return aborted

    def propagate_error(self, error: BaseException) -> None:
        """End every request with `error`; each gets a copy that carries its partial output, where it can."""
        queues: dict[int, tuple[RequestOutputCollector, list[RequestOutput]]] = {}
        for state in list(self.request_states.values()):
            self._forget(state)
            if state.queue is not None:
                queues.setdefault(id(state.queue), (state.queue, []))[1].append(state.snapshot())
        for queue, partials in queues.values():
            for other in partials[1:]:
                partials[0].add(other, aggregate=False)
            own = copy.copy(error)
            if isinstance(own, (EngineDeadError, RequestFailedError)):
                own.partial = partials[0]
            queue.put(own)

    def stats_of(self, request_id: str) -> list[RequestStateStats]:
        """The times of the running requests that an external id means, those of n answers in order."""
        states = [self.request_states[found] for found in self._internal_ids(request_id, internal=False)]
        return [state.stats for state in states if state.stats is not None]

    def snapshot(self, request_id: str) -> RequestOutput | None:
        """Text and tokens so far of a request that is still running (internal id), for an error to carry."""
        state = self.request_states.get(request_id)
        return state.snapshot() if state is not None else None

    def _process(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp: float | None,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        if iteration_stats is not None and state.stats is not None:
            assert timestamp is not None
            iteration_stats.update_from_output(output, timestamp, state.stats)
        kept, stop = state.take(output)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop
        prefill = output.prefill_stats
        if prefill is not None and state.stats is not None:
            state.stats.way.decoded = time.monotonic()
        made = state.make_request_output(
            kept,
            output.pooling_output,
            finish_reason,
            stop_reason,
            output.kv_transfer_params,
            prefill.num_cached_tokens if prefill is not None else None,
        )
        if finish_reason is not None:
            self._finish(state, finish_reason, iteration_stats)
            if not output.finished:
                result.reqs_to_abort.append(state.request_id)
        self._deliver(state, made, result)

    def _finish(self, state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats | None) -> None:
        self._forget(state)
        if iteration_stats is not None and state.stats is not None:
            iteration_stats.update_from_finished_request(
                finish_reason,
                state.stats,
                num_prompt_tokens=len(state.prompt_token_ids),
                max_tokens_param=state.params.max_tokens,
                n=state.parent_req.n if state.parent_req is not None else 1,
            )

    def _fail(self, state: RequestState, error: Exception, result: OutputProcessorOutput) -> None:
        """End the request that the fault belongs to, with its siblings of n > 1."""
        logger.warning("Request %s failed while its output was processed.", state.request_id, exc_info=error)
        family = [state]
        if state.parent_req is not None:
            family += [self.request_states[i] for i in state.parent_req.child_requests if i in self.request_states]
        for member in family:
            if self.request_states.get(member.request_id) is member:
                self._forget(member)
                result.reqs_to_abort.append(member.request_id)
        reason = f"Request {state.external_req_id} failed while its output was processed: {error!r}. Others go on."
        partial = state.failed_output(reason)
        if state.queue is None:
            result.request_outputs.append(partial)
            return
        failure = RequestFailedError(reason, request_id=state.external_req_id, partial=partial)
        failure.__cause__ = error
        state.queue.put(failure)

    def _deliver(self, state: RequestState, output: RequestOutput | None, result: OutputProcessorOutput | None) -> None:
        if output is None:
            return
        if state.queue is not None:
            state.queue.put(output)
        elif result is not None:
            result.request_outputs.append(output)

    def _internal_ids(self, request_id: str, internal: bool) -> list[str]:
        """The running requests that an id means."""
        found = self._children.get(request_id) if internal else self._external.get(request_id)
        if found is None and request_id in self.request_states:
            found = [request_id]
        if found is None and not internal:  # "1_g3": the second of the n answers to "g3"
            index, _, external = request_id.partition("_")
            found = [child for child in self._external.get(external, ()) if child.startswith(f"{index}_")] or None
        return list(found if found is not None else self._children.get(request_id, []))

    def _forget(self, state: RequestState) -> None:
        if self.request_states.pop(state.request_id, None) is None:
            return
        if state.stats is not None:
            state.stats.way.ended = time.monotonic()
        _remove(self._external, state.external_req_id, state.request_id)
        if state.parent_req is not None:
            _remove(self._children, state.parent_req.request_id, state.request_id)


def _remove(ids: dict[str, list[str]], key: str, value: str) -> None:
    ids[key].remove(value)
    if not ids[key]:
        del ids[key]
