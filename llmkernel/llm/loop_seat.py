"""LoopSeat: what one event loop has of an engine: a client of its own, and the streams of its requests (design D1)."""

import asyncio
import contextlib
import copy
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from llmkernel.client.background_task import background_task
from llmkernel.client.core_client import EngineCoreClient
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.llm.admission import AdmissionAborted, Admissions
from llmkernel.llm.engine_watch import EngineWatch
from llmkernel.llm.input_processor import InputProcessor, check_params
from llmkernel.llm.loggers import StatListener, StatLogger
from llmkernel.llm.output_handler import handle_outputs
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import EngineCoreRequest, LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import RequestProgress

__all__ = ["LoopSeat"]


class LoopSeat:
    """One event loop's place at an engine. It belongs to the loop that runs when it is made, else to the first user.

    engine_core: an AsyncMPClient, which owns the engine or is attached to it; ends with `close`, or with the loop.
    facts: what was loaded, None until it is. tokenizer: one that another seat has built, if there is one.
    stat_listeners: hear the statistics of every message, with log_stats.
    """

    def __init__(
        self, args: EngineArgs, engine_core: EngineCoreClient, log_stats: bool, tokenizer: Tokenizer | None = None
    ) -> None:
        self.engine_core = engine_core
        self.facts: EngineCoreReadyResponse | None = None
        self.input_processor: InputProcessor | None = None
        self.output_processor = OutputProcessor(log_stats=log_stats, stream_interval=args.stream_interval)
        self.output_handler: asyncio.Task[None] | None = None
        self.tokenizer = tokenizer
        self.loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):  # no loop runs
            self.loop = asyncio.get_running_loop()
        self._args = args
        self._log_stats = log_stats
        self.stat_listeners: list[StatListener] = []
        self.watch = _watch(engine_core, self.output_processor)
        self._ready_task: asyncio.Task[EngineCoreReadyResponse] | None = None
        self._admissions = Admissions()

    @property
    def errored(self) -> bool:
        """No request can be served any more."""
        handler = self.output_handler
        return self.engine_core.engine_dead or (handler is not None and handler.done() and not handler.cancelled())

    @property
    def dead_error(self) -> EngineDeadError:
        """Why, as a fresh exception."""
        return self.engine_core.dead_error or EngineDeadError()

    @property
    def failure(self) -> Exception:
        """Why it is errored: what ended the load, or else the engine. A fresh exception."""
        load = self._ready_task
        error = load.exception() if load is not None and load.done() and not load.cancelled() else None
        return copy.copy(error) if isinstance(error, EngineStartupError) else self.dead_error

    async def ready(self) -> EngineCoreReadyResponse:
        """Wait until the engine takes requests; cancelling this ends the wait, not the load."""
        if self._ready_task is None:
            self._ready_task = background_task(self._load(), "llmkernel-load")
            self._ready_task.add_done_callback(_look_at_exception)
            self.watch.somebody_waits()
        return await asyncio.shield(self._ready_task)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | ChatPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None,
        lora_request: LoRARequest | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        trace_headers: Mapping[str, str] | None,
        priority: int,
        data_parallel_rank: int | None,
    ) -> RequestOutputCollector:
        """See AsyncLLM.add_request."""
        if self.errored:
            raise self.dead_error
        check_params(params)
        collector = RequestOutputCollector(params.output_kind, request_id)
        admission = self._admissions.enter(request_id)
        try:
            if self.facts is None:
                await admission.run(self.ready())
            assert self.input_processor is not None
            arrival_time = time.time() if arrival_time is None else arrival_time
            if self.input_processor.is_long(prompt):
                work = asyncio.to_thread(self.input_processor.tokenize, prompt, tokenization_kwargs)
                tokenized = await admission.run(work)
            else:
                tokenized = self.input_processor.tokenize(prompt, tokenization_kwargs)
        except AdmissionAborted:
            collector.put(_aborted_output(request_id, prompt))
            return collector
        finally:
            self._admissions.leave(request_id, admission)
        request = self.input_processor.process_inputs(
            request_id, tokenized, params, arrival_time, lora_request, trace_headers, priority, data_parallel_rank
        )
        await self._submit(request, tokenized.text, collector)
        return collector

    async def abort(self, request_ids: list[str], *, internal: bool) -> None:
        """See AsyncLLM.abort."""
        self._admissions.abort(request_ids)
        ids = self.output_processor.abort_requests(request_ids, internal=internal)
        await self.engine_core.abort_requests_async(ids)

    def abort_soon(self, request_ids: list[str], *, internal: bool = False) -> None:
        """As `abort`, from code on the loop that cannot await."""
        self._admissions.abort(request_ids)
        ids = self.output_processor.abort_requests(request_ids, internal=internal)
        if ids and not self.engine_core.engine_dead:
            self.engine_core.abort_requests_soon(ids)  # type: ignore[attr-defined]  # of AsyncMPClient

    def stop_requests(self, request_ids: list[str]) -> None:
        """As `abort`, from any thread: the engine hears of it at once, the streams when the loop turns."""
        engine = self.engine_core.running_engine  # type: ignore[attr-defined]  # of AsyncMPClient
        ids = self.output_processor.internal_ids(request_ids)
        if ids and engine is not None and not self.engine_core.engine_dead:
            with engine.control() as control:
                control.abort_soon(ids)
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # it has closed, and the streams with it
                self.loop.call_soon_threadsafe(self.abort_soon, request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See AsyncLLM.call_utility."""
        await self.ready()
        self.watch.somebody_waits()  # it looks when this call has been registered
        return await self.engine_core.call_utility_async(method, *args)

    async def get_request_progress(self) -> list[RequestProgress]:
        """See AsyncLLM.get_request_progress."""
        told = await self.call_utility("get_request_progress", self.engine_core.client_index)  # type: ignore[attr-defined]
        return msgspec.convert(told, list[RequestProgress])

    def close(self, timeout: float = 5.0, *, restarting: bool = False) -> int:
        """End the engine, or leave it where it is another's; idempotent, from any thread. Bytes of memory it held.

        restarting: another one follows, and whoever waits hears so.
        """
        return self.engine_core.shutdown(timeout, restarting=restarting)  # type: ignore[call-arg]  # of MPClient

    async def _load(self) -> EngineCoreReadyResponse:
        try:
            facts: EngineCoreReadyResponse = await self.engine_core.ready()
        finally:
            self.watch.close()
        if self.tokenizer is None and (facts.tokenizer.json is not None or facts.tokenizer.path is not None):
            try:
                self.tokenizer = await asyncio.to_thread(Tokenizer.from_facts, facts.tokenizer)
            except Exception as error:
                # the library raises a bare Exception for a file that it cannot read
                raise EngineStartupError(
                    f"The tokenizer of {facts.model.name} cannot be read: {error}; load the model with tokenizer=..."
                ) from error
        self.output_processor.tokenizer = self.tokenizer
        self.output_processor.clock_offset = self.engine_core.clock_offset
        self.input_processor = InputProcessor(self._args, facts, self.tokenizer)
        self._run_output_handler()
        self.facts = facts
        return facts

    async def _submit(self, request: EngineCoreRequest, prompt: str | None, queue: RequestOutputCollector) -> None:
        params = request.sampling_params
        assert params is not None
        self.watch.somebody_waits()
        queue.request_id = request.request_id
        queue.sampling_params = params
        try:
            if params.n == 1:
                state = self.output_processor.add_request(request, prompt, None, 0, queue)
                await self.engine_core.add_request_async(request)
                state.sent()
            else:
                await self._fan_out(ParentRequest(request), prompt, queue)
        except BaseException:
            self.abort_soon([request.request_id], internal=True)
            raise

    async def _fan_out(self, parent: ParentRequest, prompt: str | None, queue: RequestOutputCollector) -> None:
        """Register all children before the first is sent, so that an abort reaches all of them."""
        states = [
            self.output_processor.add_request(child, prompt, parent, index, queue)
            for index, child in enumerate(parent.children)
        ]
        for child, state in zip(parent.children, states, strict=True):
            if child.request_id in self.output_processor.request_states:
                await self.engine_core.add_request_async(child)
                state.sent()

    def _run_output_handler(self) -> None:
        """Start the task that takes what the engine sends to the queues of the requests."""
        stat_logger = StatLogger(listeners=self.stat_listeners) if self._log_stats else None
        coroutine = handle_outputs(self.engine_core, self.output_processor, stat_logger, self.watch)
        task = self.output_handler = background_task(coroutine, "llmkernel-output-handler")
        weakref.finalize(self, _cancel_soon, task).atexit = False


def _watch(engine_core: EngineCoreClient, output_processor: OutputProcessor) -> EngineWatch:
    """It must not hold the seat, so that a forgotten one is collected."""
    ping, calls = engine_core.ping, engine_core.utility_results  # type: ignore[attr-defined]  # of AsyncMPClient
    startup = engine_core.startup  # type: ignore[attr-defined]
    return EngineWatch(ping, lambda: not startup.over or output_processor.has_unfinished_requests() or len(calls) > 0)


def _aborted_output(request_id: str, prompt: PromptType | ChatPrompt) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    completion = CompletionOutput(0, "", [], finish_reason="abort")
    return RequestOutput(request_id, text, None, outputs=[completion], finished=True)


def _look_at_exception(task: "asyncio.Task[Any]") -> None:
    """Keeps asyncio from reporting a failed load that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _cancel_soon(task: "asyncio.Task[None]") -> None:
    loop = task.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
