"""AsyncLLM: many requests at once on an event loop, each a stream of its own."""

import asyncio
import contextvars
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from llmkernel.client.core_client import EngineCoreClient, make_async_mp_client
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError, UnsupportedFeatureError
from llmkernel.llm.admission import AdmissionAborted, Admissions
from llmkernel.llm.input_processor import InputProcessor, check_params
from llmkernel.llm.loggers import StatLogger
from llmkernel.llm.output_handler import handle_outputs
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import EngineCoreRequest, LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SchedulerStats

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """An engine process of its own, and the streams of its requests.

    `AsyncLLM(args)` returns at once, inside or outside a loop; `await ready()`, or the first request, waits for the
    load. Belongs to the loop that first uses it. Ends the engine with `shutdown()`, `with` or `async with`.

    executor_class: import path "module:Class" of another executor. facts: what was loaded, None until it is.
    """

    def __init__(self, args: EngineArgs, *, executor_class: str | None = None, log_stats: bool = True) -> None:
        self.args = args
        self.log_stats = log_stats and args.log_stats
        self.facts: EngineCoreReadyResponse | None = None
        self.input_processor: InputProcessor | None = None
        self.output_processor = OutputProcessor(log_stats=self.log_stats, stream_interval=args.stream_interval)
        self.engine_core: EngineCoreClient = make_async_mp_client(args, executor_class, self.log_stats)
        self.output_handler: asyncio.Task[None] | None = None
        self._tokenizer: Tokenizer | None = None
        self._loop = _running_loop()
        self._ready_task: asyncio.Task[EngineCoreReadyResponse] | None = None
        self._admissions = Admissions()

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, executor_class: str | None = None, log_stats: bool = True
    ) -> "AsyncLLM":
        """vLLM's constructor."""
        return cls(args, executor_class=executor_class, log_stats=log_stats)

    # Starting and ending.

    async def ready(self) -> EngineCoreReadyResponse:
        """Wait until the engine takes requests; EngineStartupError says why it did not.

        Cancelling this ends the wait, not the load.
        """
        self._check_loop()
        if self._ready_task is None:
            # an empty context: what the load prints or logs belongs to no notebook cell
            self._ready_task = asyncio.get_running_loop().create_task(
                self._load(), name="llmkernel-load", context=contextvars.Context()
            )
            self._ready_task.add_done_callback(_look_at_exception)
        return await asyncio.shield(self._ready_task)

    def add_progress_callback(self, callback: Callable[[Progress], None]) -> None:
        """Call `callback` with every Progress of the load."""
        self.engine_core.add_progress_callback(callback)  # type: ignore[attr-defined]  # of AsyncMPClient

    def shutdown(self, timeout: float = 5.0) -> int:
        """End the engine; streams that still run raise EngineDeadError. Idempotent, from any thread.

        Returns the bytes of memory that the engine's process held. Blocks for at most about `timeout` seconds.
        """
        return self.engine_core.shutdown(timeout)

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # Requests.

    async def add_request(
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
    ) -> RequestOutputCollector:
        """Submit a request; its outputs come through the collector. Waits for the load, and then for the send.

        Whoever takes the collector must abort the request if it stops reading; `generate` does that by itself.
        """
        self._check_loop()
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
            request_id,
            tokenized,
            params,
            arrival_time,
            lora_request,
            trace_headers,
            priority,
            data_parallel_rank,
        )
        await self._submit(request, tokenized.text, collector)
        return collector

    async def generate(
        self,
        prompt: PromptType | ChatPrompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a prompt and yield its outputs as they come, until one is finished.

        Leaving early, in any way (break and aclose, cancelling, an exception), aborts the request. sampling_params
        None: the model's own defaults.
        """
        if sampling_params is None:
            sampling_params = await self.get_default_sampling_params()
        collector = await self.add_request(
            request_id or f"req-{secrets.token_hex(4)}",
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort_soon([collector.request_id], internal=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, with a conversation [{"role": ..., "content": ...}, ...] in place of a prompt."""
        chat = ChatPrompt(
            messages=messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs,
        )
        return self.generate(
            chat, sampling_params, request_id, lora_request, trace_headers, priority, data_parallel_rank
        )

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Text and ids that `chat` would send."""
        await self.ready()
        assert self.input_processor is not None
        chat = ChatPrompt(
            messages=messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs,
        )
        rendered = await asyncio.to_thread(self.input_processor.render_chat, chat)
        return rendered.text or "", rendered.token_ids

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedFeatureError("encode (pooling) is not built yet; use generate.", parameter="encode")

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests: their streams end with finish_reason "abort". An id that is not running means nothing.

        An id stands for all requests that carry it and for all n answers; also for one that still waits for the load.
        """
        self._check_loop()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._admissions.abort(ids)
        await self.engine_core.abort_requests_async(self.output_processor.abort_requests(ids, internal=internal))

    def abort_soon(self, request_id: str | Iterable[str]) -> None:
        """As `abort`, from code that cannot await; call it on the loop."""
        self._abort_soon([request_id] if isinstance(request_id, str) else list(request_id), internal=False)

    # State.

    @property
    def errored(self) -> bool:
        """No request can be served any more."""
        handler = self.output_handler
        return self.engine_core.engine_dead or (handler is not None and handler.done())

    @property
    def dead_error(self) -> EngineDeadError:
        """Why, as a fresh exception."""
        return self.engine_core.dead_error or EngineDeadError()

    @property
    def is_running(self) -> bool:
        return self.facts is not None and not self.errored

    @property
    def num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    def get_scheduler_stats(self) -> SchedulerStats | None:
        """The engine's state after the newest step that had something to say."""
        return self.output_processor.scheduler_stats

    async def check_health(self) -> None:
        """EngineDeadError if the engine is gone; otherwise asks it."""
        if self.errored:
            raise self.dead_error
        await self.call_utility("check_health")

    async def get_tokenizer(self) -> Tokenizer | None:
        await self.ready()
        return self._tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's generation_config says."""
        await self.ready()
        assert self.input_processor is not None
        return self.input_processor.default_sampling_params()

    async def special_tokens_in(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Special tokens whose text stands in a message: they are sent as the special token, not as text."""
        await self.ready()
        assert self.input_processor is not None
        return self.input_processor.special_tokens_in(messages)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, one of its allow-list; UtilityCallError carries what it raised."""
        await self.ready()
        return await self.engine_core.call_utility_async(method, *args)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's name; the engine minds it, not this coroutine
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on every worker; one result per worker."""
        await self.ready()
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if blocks are in use."""
        return bool(await self.call_utility("reset_prefix_cache"))

    async def get_stats(self) -> dict[str, Any]:
        """The engine's SchedulerStats now, as a dict."""
        stats: dict[str, Any] = await self.call_utility("get_stats")
        return stats

    # Inside.

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise UnsupportedFeatureError(
                "This AsyncLLM belongs to another event loop, and a client serves one loop: make another AsyncLLM in"
                " this loop, or do all the work inside one asyncio.run.",
                parameter="loop",
            )

    async def _load(self) -> EngineCoreReadyResponse:
        facts: EngineCoreReadyResponse = await self.engine_core.ready()
        if facts.tokenizer.json is not None or facts.tokenizer.path is not None:
            try:
                self._tokenizer = await asyncio.to_thread(Tokenizer.from_facts, facts.tokenizer)
            except Exception as error:
                # the library raises a bare Exception for a file that it cannot read
                raise EngineStartupError(
                    f"The tokenizer of {facts.model.name} cannot be read: {error}; load the model with tokenizer=..."
                ) from error
        self.output_processor.tokenizer = self._tokenizer
        self.input_processor = InputProcessor(self.args, facts, self._tokenizer)
        self._run_output_handler()
        self.facts = facts
        return facts

    async def _submit(self, request: EngineCoreRequest, prompt: str | None, queue: RequestOutputCollector) -> None:
        params = request.sampling_params
        assert params is not None
        queue.request_id = request.request_id
        queue.sampling_params = params
        try:
            if params.n == 1:
                await self._add_request(request, prompt, None, 0, queue)
            else:
                await self._fan_out(ParentRequest(request), prompt, queue)
        except BaseException:
            self._abort_soon([request.request_id], internal=True)
            raise

    async def _fan_out(self, parent: ParentRequest, prompt: str | None, queue: RequestOutputCollector) -> None:
        """Register all children before the first is sent, so that an abort reaches all of them."""
        for index, child in enumerate(parent.children):
            self.output_processor.add_request(child, prompt, parent, index, queue)
        for child in parent.children:
            if child.request_id in self.output_processor.request_states:
                await self.engine_core.add_request_async(child)

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        await self.engine_core.add_request_async(request)

    def _abort_soon(self, request_ids: list[str], *, internal: bool) -> None:
        self._admissions.abort(request_ids)
        ids = self.output_processor.abort_requests(request_ids, internal=internal)
        if ids and not self.engine_core.engine_dead:
            self.engine_core.abort_requests_soon(ids)  # type: ignore[attr-defined]  # of AsyncMPClient

    def _run_output_handler(self) -> None:
        """Start the task that takes what the engine sends to the queues of the requests."""
        stat_logger = StatLogger() if self.log_stats else None
        coroutine = handle_outputs(self.engine_core, self.output_processor, stat_logger)
        task = asyncio.get_running_loop().create_task(
            coroutine, name="llmkernel-output-handler", context=contextvars.Context()
        )
        self.output_handler = task
        weakref.finalize(self, _cancel_soon, task).atexit = False


def _aborted_output(request_id: str, prompt: PromptType | ChatPrompt) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    completion = CompletionOutput(0, "", [], finish_reason="abort")
    return RequestOutput(request_id, text, None, outputs=[completion], finished=True)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _look_at_exception(task: "asyncio.Task[Any]") -> None:
    """Keeps asyncio from reporting a failed load that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _cancel_soon(task: "asyncio.Task[None]") -> None:
    loop = task.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
