"""EngineCore: the engine without sockets. Add, abort, and `step()` = schedule, execute, update."""

import contextlib
import importlib.metadata
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from llmkernel.config import EngineArgs
from llmkernel.engine.executor import Executor
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.kv_cache.manager import KVCacheManager
from llmkernel.engine.pause_control import PauseControl
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.request_checks import RequestLimits, check_request
from llmkernel.engine.scheduler.output import SchedulerOutput
from llmkernel.engine.scheduler.progress import request_progress
from llmkernel.engine.scheduler.scheduler import Scheduler
from llmkernel.engine.step_retry import reason_of, retry_by_halves
from llmkernel.engine.structured.compiler import GrammarCompiler
from llmkernel.engine.structured.grammar import GrammarBackend
from llmkernel.errors import LLMKernelError, UnsupportedFeatureError
from llmkernel.logger import init_logger
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.outputs import EngineCoreEvent, EngineCoreEventType, EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.stats import RequestProgress, SchedulerStats
from llmkernel.speculative_config import SpeculativeConfig

__all__ = ["EngineCore"]

logger = init_logger(__name__)

UNBUILT_UTILITIES = frozenset(
    {
        "add_lora",
        "commit_prepared_elastic_ep",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "get_weight_version",
        "handle_fault_tolerance",
        "pin_lora",
        "profile",
        "reinitialize_distributed",
        "release_kv_cache_memory",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "set_weight_version",
        "sleep",
        "wake_up",
    }
)
"""vLLM's utilities that are refused by name."""


class EngineCore:
    """Scheduler, KV blocks and executor, driven by whoever calls `step`; it owns the executor.

    Everything is called from one thread, the engine's main one, except `preprocess_add_request`. A wrong request is
    refused before it is added; one that fails ends with FinishReason.ERROR and the reason, and the engine goes on. A
    step that raises is run again without the requests at fault (step_retry).

    ready: what a client has to know; max_model_len is what the model, the options and the KV pool allow together.
    scheduler: to look at (statistics, checks); change it through the methods here.
    on_grammar_compiled: called, in another thread, when there may be work again, though no request came in.
    aborts_queue: any thread may put request ids there, to end them between the forward that runs now and what it brings
    (engine.md B.6-3). Ids that are not here yet are passed over, so `abort_requests` must follow in order.
    """

    def __init__(self, args: EngineArgs, executor: Executor, report: ReportProgress) -> None:
        """Starts the executor, which may take minutes; its errors pass through."""
        self._args = args
        self._executor: Executor | None = executor
        facts = executor.start(args, report)
        self._kv_cache = KVCacheManager(facts.num_blocks, facts.block_size, enable_caching=args.enable_prefix_caching)
        self.scheduler = Scheduler(
            self._kv_cache,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
            policy=args.scheduling_policy,
            stream_interval=args.stream_interval,
            speculative=None if args.speculative is None else SpeculativeConfig.parse(args.speculative),
        )
        self._limits = RequestLimits(
            vocab_size=facts.model.vocab_size,
            max_model_len=self.scheduler.max_model_len,
            num_blocks=self._kv_cache.pool.num_usable_blocks,
            block_size=facts.block_size,
        )
        self._grammars = GrammarCompiler(
            lambda: _grammar_backend(facts), _end_token_ids(facts), lambda: self.on_grammar_compiled()
        )
        self.on_grammar_compiled: Callable[[], None] = lambda: None
        self._pauses = PauseControl(self.scheduler)
        self._utilities = self._registered_utilities()
        self._step_time = 0.0
        self._step_started: float | None = None
        self.aborts_queue: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
        self.ready = self._describe(facts)

    # Requests.

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Check a request and hash its blocks; safe in the input thread. InvalidRequestError says what to change."""
        received = time.monotonic()
        check_request(request, self._limits)
        assert request.sampling_params is not None
        structured = self._grammars.begin(request.sampling_params)
        taken = Request.from_engine_core_request(request, self._kv_cache.hash_new_blocks, structured)
        taken.events.append(EngineCoreEvent(EngineCoreEventType.RECEIVED, received))
        return taken

    def add_request(self, request: Request) -> None:
        """Queue the request. InvalidRequestError if its id is in use; the request that has it is not touched."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests with FinishReason.ABORT; ids that are unknown or ended are passed over."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abort_all_requests(self) -> None:
        """End every live request with FinishReason.ABORT."""
        self.abort_requests(list(self.scheduler.requests))

    def reject_request(self, request: EngineCoreRequest, reason: str) -> None:
        """Tell the client, with the next step, that the request ended with FinishReason.ERROR before it began.

        Not if the client's own live request has this id: that one's stream goes on.
        """
        live = self.scheduler.requests.get(request.request_id)
        if live is not None and live.client_index == request.client_index:
            logger.warning("Request %s was sent twice; the second one is dropped: %s", request.request_id, reason)
            return
        self.scheduler.outbox.refuse(request.client_index, request.request_id, reason)

    def has_requests(self) -> bool:
        """`step` has something to do: requests that may run, ended ones to tell of, a pause to complete."""
        return bool(self.scheduler.outbox) or self.scheduler.has_work() or self._pauses.has_settled

    def abort_client_requests(self, client_index: int) -> None:
        """End every live request of this client: it is gone."""
        requests = self.scheduler.requests.values()
        self.abort_requests([request.request_id for request in requests if request.client_index == client_index])

    def has_unfinished_requests(self) -> bool:
        """Live requests, paused ones included."""
        return bool(self.scheduler.requests)

    # The step.

    @property
    def step_age(self) -> float:
        """Seconds for which the present step has run, 0 between steps. From any thread."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def step(self) -> dict[int, EngineCoreOutputs]:
        """One step; what it brought, by client_index. Empty if there was nothing to do, or what it brought may wait."""
        self._pauses.settle()
        if not self.scheduler.has_work():
            return self.take_outputs()
        started = self._step_started = time.monotonic()
        step = self.scheduler.schedule()
        self._execute(step)
        ended = time.monotonic()
        self._step_time = ended - started
        self.scheduler.take_step_time(self._step_time)
        self._step_started = None
        if self.scheduler.outbox.may_wait(ended) and not step.preempted_req_ids:
            return {}
        return self._tell(ended)

    def pace_outputs(self, seconds: float) -> None:
        """Let further tokens of running requests wait for those of the next steps until the last telling is `seconds`
        ago. `take_outputs` tells them before that: call it before something else is done than the next step.
        """
        self.scheduler.outbox.pace = seconds

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """What the clients have still to be told, by client_index, at once."""
        return self._tell(time.monotonic()) if self.scheduler.outbox else {}

    def shutdown(self) -> None:
        """Give everything back; idempotent."""
        self._pauses.shutdown()
        self._grammars.shutdown()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _tell(self, now: float) -> dict[int, EngineCoreOutputs]:
        stats = self._stats() if self._args.log_stats else None
        return self.scheduler.outbox.take(stats, now)

    def _execute(self, step: SchedulerOutput) -> None:
        executor = self._running_executor()
        try:
            output = executor.execute_model(step)
        except Exception as error:  # whatever a step raises must cost the requests at fault only
            logger.exception("A step of %d requests failed", len(step.num_scheduled_tokens))
            executor.check_health()
            retried = retry_by_halves(executor, step, self._block_ids, error)
            if retried is None:
                self.scheduler.fail_step(step, reason_of(error))
                return
            output = retried
        self._take_early_aborts()
        self.scheduler.update_from_output(step, output)

    def _block_ids(self, request_id: str) -> list[int]:
        return self._kv_cache.block_ids(self.scheduler.requests[request_id])

    def _take_early_aborts(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.abort_requests(self.aborts_queue.get_nowait())

    # Utilities: what a client may call by name.

    def call_utility(self, method: str, args: Sequence[Any] = ()) -> Any:
        """Call a registered utility; its result may be a Future, for a reply that comes later."""
        if method in UNBUILT_UTILITIES:
            raise UnsupportedFeatureError(f"{method} is not built yet; do without it.", parameter=method)
        if method not in self._utilities:
            raise AttributeError(f"The engine has no utility {method!r}; it has {', '.join(sorted(self._utilities))}.")
        return self._utilities[method](*args)

    def _registered_utilities(self) -> dict[str, Callable[..., Any]]:
        return {
            "check_health": self.check_health,
            "collective_rpc": self.collective_rpc,
            "get_request_progress": self.get_request_progress,
            "get_stats": self.get_stats,
            "get_supported_tasks": self.get_supported_tasks,
            "is_scheduler_paused": self.is_scheduler_paused,
            "is_sleeping": self.is_sleeping,
            "list_loras": self.list_loras,
            "pause_scheduler": self.pause_scheduler,
            "reset_prefix_cache": self.reset_prefix_cache,
            "resume_scheduler": self.resume_scheduler,
        }

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False while requests hold blocks, unless reset_running_requests preempts them."""
        if reset_connector:
            raise UnsupportedFeatureError(
                "reset_connector is not built yet; leave it out.", parameter="reset_connector"
            )
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        return self._pauses.pause(mode, clear_cache)

    def resume_scheduler(self) -> None:
        self._pauses.resume()

    def is_scheduler_paused(self) -> bool:
        return self._pauses.is_paused

    def is_sleeping(self) -> bool:
        """A paused engine counts as asleep; nothing deeper is built."""
        return self._pauses.is_paused

    def list_loras(self) -> list[int]:
        return []

    def check_health(self) -> None:
        """Raise if the executor is gone."""
        self._running_executor().check_health()

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call `method` on every worker: a name of the worker's own allow-list, never code."""
        if not isinstance(method, str):
            raise UnsupportedFeatureError(
                "collective_rpc takes a method's name; code does not travel.", parameter="method"
            )
        return self._running_executor().collective_rpc(method, timeout, args, kwargs)

    def get_stats(self) -> dict[str, Any]:
        """SchedulerStats as a dict; prefix_cache_stats are totals since the start."""
        stats = self._stats(total_cache_stats=True)
        return msgspec.structs.asdict(stats) | {
            name: msgspec.structs.asdict(value)
            for name in ("prefix_cache_stats", "waiting_head", "spec_decoding_stats")
            if (value := getattr(stats, name)) is not None
        }

    def _stats(self, *, total_cache_stats: bool = False) -> SchedulerStats:
        stats = self.scheduler.make_stats(self._step_time, total_cache_stats=total_cache_stats)
        if self._executor is not None:
            stats.num_threads = self._executor.num_threads
        return stats

    def get_request_progress(self, client_index: int = 0) -> list[RequestProgress]:
        """Where the requests of a client stand that bring no tokens: those that wait, and those whose text is read."""
        return request_progress(self.scheduler, client_index)

    def _running_executor(self) -> Executor:
        if self._executor is None:
            raise LLMKernelError("The engine core was shut down; make a new one.")
        return self._executor

    def _describe(self, facts: ExecutorFacts) -> EngineCoreReadyResponse:
        return EngineCoreReadyResponse(
            version=importlib.metadata.version("llmkernel"),  # the root package's names reach up to the notebook
            pid=os.getpid(),
            max_model_len=self.scheduler.max_model_len,
            num_gpu_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self._args.max_num_batched_tokens,
            kv_cache_size_tokens=self._kv_cache.capacity,
            kv_cache_bytes=facts.kv_cache_bytes,
            enable_prefix_caching=self._args.enable_prefix_caching,
            scheduling_policy=self._args.scheduling_policy,
            num_threads=facts.num_threads,
            model=facts.model,
            tokenizer=facts.tokenizer,
            load_timings=facts.load_timings,
        )


def _end_token_ids(facts: ExecutorFacts) -> list[int]:
    """The tokens that end a text of this model."""
    eos = facts.tokenizer.eos_token_id
    return list(dict.fromkeys([*([] if eos is None else [eos]), *facts.model.stop_token_ids]))


def _grammar_backend(facts: ExecutorFacts) -> GrammarBackend:
    from llmkernel.engine.structured.guidance_backend import GuidanceBackend  # most engines never need it

    return GuidanceBackend(facts.tokenizer, facts.model.vocab_size, _end_token_ids(facts))
