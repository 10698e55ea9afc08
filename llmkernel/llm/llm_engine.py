"""LLMEngine: add requests, take steps; the blocking counterpart of AsyncLLM."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.core_client import EngineCoreClient, make_client
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError
from llmkernel.llm.blocking_watch import BlockingWatch
from llmkernel.llm.engine_watch import EngineHealth, EngineWatch
from llmkernel.llm.input_processor import InputProcessor
from llmkernel.llm.loggers import StatLogger
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.stats import IterationStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.control import Pong
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SchedulerStats

__all__ = ["LLMEngine"]


class LLMEngine:
    """An engine, used by blocking calls: `add_request`, then `step` while `has_unfinished_requests`.

    The constructor returns when the model is loaded. Needs no event loop, and works where one is running. Not for
    several threads at once (LLM is). multiprocess_mode False: the engine lives in this process, for tests and
    lessons. engine: one that runs already, to share in place of starting one; `args` are those it was started with.
    on_health: see `add_health_callback`; from here on it hears of a load that gets stuck, too.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor_class: str | None = None,
        log_stats: bool = True,
        multiprocess_mode: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
        on_health: Callable[[EngineHealth], None] | None = None,
        engine: RunningEngine | None = None,
    ) -> None:
        self.args = args
        self.log_stats = log_stats and args.log_stats
        self.engine_core: EngineCoreClient = make_client(
            multiprocess_mode, False, args, executor_class, self.log_stats, engine
        )
        self.output_processor = OutputProcessor(log_stats=self.log_stats, stream_interval=args.stream_interval)
        self._watch = _watch(self.engine_core, self.output_processor)
        try:
            if on_health is not None:
                self.add_health_callback(on_health)
            if on_progress is not None and hasattr(self.engine_core, "add_progress_callback"):
                self.engine_core.add_progress_callback(on_progress)
            self.facts: EngineCoreReadyResponse = self.engine_core.ready()
            told = self.facts.tokenizer
            has_tokenizer = told.json is not None or told.path is not None
            self.tokenizer: Tokenizer | None = Tokenizer.from_facts(told) if has_tokenizer else None
        except BaseException:
            self.engine_core.shutdown()
            raise
        self.input_processor = InputProcessor(args, self.facts, self.tokenizer)
        self.output_processor.tokenizer = self.tokenizer
        self.output_processor.clock_offset = self.engine_core.clock_offset
        self._stat_logger = StatLogger() if self.log_stats else None

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **options: Any) -> "LLMEngine":
        """vLLM's constructor."""
        return cls(args, **options)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | ChatPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        *,
        queue: RequestOutputCollector | None = None,
    ) -> str:
        """Submit a request; returns its internal id. With `queue` its outputs go there, else `step` returns them."""
        if self.errored:
            raise self.dead_error
        arrival_time = time.time() if arrival_time is None else arrival_time
        tokenized = self.input_processor.tokenize(prompt, tokenization_kwargs)
        request = self.input_processor.process_inputs(
            request_id, tokenized, params, arrival_time, lora_request, trace_headers, priority, data_parallel_rank
        )
        sent = request.sampling_params
        assert sent is not None
        if queue is not None:
            queue.request_id, queue.sampling_params = request.request_id, sent
        parent = ParentRequest(request) if sent.n > 1 else None
        children = parent.children if parent is not None else [request]
        try:
            states = [
                self.output_processor.add_request(child, tokenized.text, parent, index, queue)
                for index, child in enumerate(children)
            ]
            for child, state in zip(children, states, strict=True):
                self.engine_core.add_request(child)
                state.sent()
        except BaseException:
            self.abort_request([request.request_id], internal=True)
            raise
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Wait for what the engine sends next; the outputs of requests without a queue. [] if nothing is unfinished."""
        if not self.has_unfinished_requests():
            return []
        try:
            outputs = self.engine_core.get_output()
        except EngineDeadError as error:
            self.output_processor.propagate_error(error)
            raise
        if self._watch is not None:
            self._watch.heard()
        iteration_stats = IterationStats.of(outputs) if self.log_stats and outputs.outputs else None
        processed = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, iteration_stats)
        if processed.reqs_to_abort:
            self.engine_core.abort_requests(processed.reqs_to_abort)
        self.output_processor.update_scheduler_stats(outputs.scheduler_stats)
        if self._stat_logger is not None:
            self._stat_logger.record(outputs.scheduler_stats, iteration_stats)
        return processed.request_outputs

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; an external id stands for all that carry it and for all n answers."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        aborted = self.output_processor.abort_requests(ids, internal=internal)
        if aborted and not self.engine_core.engine_dead:
            self.engine_core.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    def get_scheduler_stats(self) -> SchedulerStats | None:
        """The engine's state after the newest step that had something to say."""
        return self.output_processor.scheduler_stats

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, one of its allow-list."""
        return self.engine_core.call_utility(method, *args)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on every worker; one result per worker."""
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if blocks are in use."""
        return bool(self.call_utility("reset_prefix_cache"))

    def check_health(self) -> None:
        """EngineDeadError if the engine is gone; otherwise asks it."""
        if self.errored:
            raise self.dead_error
        self.call_utility("check_health")

    @property
    def health(self) -> EngineHealth:
        """ "ok", "slow" or "stuck", as far as it is known while a call waits: see EngineHealth. From any thread."""
        return self._watch.health if self._watch is not None else EngineHealth()

    def add_health_callback(self, callback: Callable[[EngineHealth], None]) -> None:
        """Call `callback`, in another thread, when the engine turns slow, stuck, or well again while a call waits."""
        if self._watch is not None:
            self._watch.listeners.append(callback)

    @property
    def errored(self) -> bool:
        return self.engine_core.engine_dead

    @property
    def running_engine(self) -> RunningEngine | None:
        """For others to attach to; None where the engine lives in this process."""
        return getattr(self.engine_core, "running_engine", None)

    @property
    def dead_error(self) -> EngineDeadError:
        return self.engine_core.dead_error or EngineDeadError()

    def shutdown(self, timeout: float = 5.0) -> int:
        """End the engine, or leave it where it is shared; idempotent. Returns the bytes of memory that came back."""
        return self.engine_core.shutdown(timeout)

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _watch(engine_core: EngineCoreClient, output_processor: OutputProcessor) -> EngineWatch | None:
    """Asks an engine process that is silent while somebody waits; None where the engine is no process of its own."""
    if not isinstance(engine_core, SyncMPClient):
        return None
    startup, calls, ping_method = engine_core.startup, engine_core.utility_results, weakref.WeakMethod(engine_core.ping)

    async def ping(timeout: float) -> Pong:  # noqa: ASYNC109 - the method minds it
        """Without holding the client, which holds this."""
        method = ping_method()
        if method is None:
            raise EngineDeadError
        return await method(timeout)

    def waits() -> bool:
        return not startup.over or output_processor.has_unfinished_requests() or len(calls) > 0

    watch = EngineWatch(ping, waits)
    engine_core.on_silence = BlockingWatch(watch).silence
    return watch
