"""AsyncLLM: many requests at once on an event loop, each a stream of its own."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.core_client import EngineCoreClient, make_async_mp_client
from llmkernel.client.keep_alive import KeepAlive
from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, InvalidRequestError, UnsupportedFeatureError
from llmkernel.llm.beam_search import BeamSearch, gather_last
from llmkernel.llm.engine_watch import EngineHealth
from llmkernel.llm.input_processor import InputProcessor
from llmkernel.llm.loggers import StatListener
from llmkernel.llm.loop_seat import LoopSeat
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.shared_engine import resolve_engine
from llmkernel.llm.stats import RequestStateStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import EngineCoreReadyResponse, Progress
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import BeamSearchParams, SamplingParams
from llmkernel.protocol.stats import RequestProgress, SchedulerStats

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """An engine process of its own, and the streams of its requests.

    `AsyncLLM(args)` returns at once, inside or outside a loop; `await ready()`, or the first request, waits for the
    load. Ends the engine with `shutdown()`, `with` or `async with`.

    Any event loop may use it, several at once, too: each has a client and streams of its own (a LoopSeat). The first
    one's client owns the engine, others are attached to it, and leave it when their loop ends.

    executor_class: import path "module:Class" of another executor. engine: one that runs already, to share in place of
    starting one; see `attach`. keep: for keep_alive, as a Session has it; together with `engine` that one, which has
    lost its owner, is made ours. generation: how often it was restarted. stat_listeners: hear the statistics of every
    message on the first loop (with log_stats), for dashboards and the like.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor_class: str | None = None,
        log_stats: bool = True,
        engine: RunningEngine | None = None,
        keep: KeepAlive | None = None,
    ) -> None:
        self.args = args
        self.log_stats = log_stats and args.log_stats
        self._executor_class = executor_class
        self._keep = keep
        self._adopted = engine if keep is not None else None
        self._shared = engine if keep is None else None
        self._progress_callbacks: list[Callable[[Progress], None]] = []
        self._health_callbacks: list[Callable[[EngineHealth], None]] = []
        self.stat_listeners: list[StatListener] = []
        self._shutdowns = 0
        self.generation = 0
        self._lock = threading.Lock()  # taking a seat; loops may be in different threads
        self._own = self._take_first_seat()
        self._guests: dict[asyncio.AbstractEventLoop, LoopSeat] = {}

    @classmethod
    def attach(cls, engine: object, *, log_stats: bool = True) -> "AsyncLLM":
        """Share an engine that runs: that of another AsyncLLM, LLM or LLMEngine, or the pid of an engine process of
        this user. It goes on when this one is shut down, and ends with its owner.
        """
        running, args = resolve_engine(engine)
        return cls(args, log_stats=log_stats, engine=running)

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
        return await self._seat().ready()

    def add_progress_callback(self, callback: Callable[[Progress], None]) -> None:
        """Call `callback` with every Progress of the load."""
        self._progress_callbacks.append(callback)
        self.engine_core.add_progress_callback(callback)  # type: ignore[attr-defined]  # of AsyncMPClient

    async def restart(self, timeout: float = 5.0) -> EngineCoreReadyResponse:  # noqa: ASYNC109 - as shutdown's
        """Start the engine anew in this same object, dead or alive; streams that still run raise EngineDeadError.

        The new engine has a client, sockets and requests of its own, so nothing of the earlier one can reach it;
        `generation` counts. Cancelling this ends the wait, not the load. timeout: see `shutdown`.
        """
        if self._shared is not None:
            raise InvalidRequestError("This engine is another's, shared here; restart it where it was loaded.")
        earlier, shutdowns = self._own, self._shutdowns
        # its memory comes back before the next one asks for some
        await asyncio.to_thread(self._end, timeout, restarting=True)
        with self._lock:
            if self._shutdowns != shutdowns:  # somebody ended it for good meanwhile
                raise self.dead_error
            if self._own is earlier:
                self._adopted = None
                self._own = self._take_first_seat()
                self.generation += 1
        return await self.ready()

    def shutdown(self, timeout: float = 5.0) -> int:
        """End the engine; streams that still run raise EngineDeadError. Idempotent, from any thread.

        Returns the bytes of memory that the engine's process held. Blocks for at most about `timeout` seconds.
        """
        with self._lock:
            self._shutdowns += 1
        return self._end(timeout)

    def _end(self, timeout: float, *, restarting: bool = False) -> int:
        with self._lock:
            guests = list(self._guests.values())
            self._guests.clear()
        held = self._own.close(timeout, restarting=restarting)
        for seat in guests:
            seat.close(timeout, restarting=restarting)
        return held

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
        return await self._seat().add_request(
            request_id,
            prompt,
            params,
            arrival_time,
            lora_request,
            tokenization_kwargs,
            trace_headers,
            priority,
            data_parallel_rank,
        )

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
        seat = self._seat()
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
                seat.abort_soon([collector.request_id], internal=True)

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

    async def beam_search(
        self,
        prompt: PromptType | ChatPrompt,
        request_id: str | None = None,
        params: BeamSearchParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The likeliest answers to a prompt, best first, in the one output of this stream."""
        processor = await self._input_processor()
        request_id = request_id or f"beam-{secrets.token_hex(4)}"
        tokenized = await asyncio.to_thread(processor.tokenize, prompt)
        search = BeamSearch(tokenized, params or BeamSearchParams(beam_width=4, max_tokens=16), await self.ready())
        while beams := search.prompts:
            streams = [
                self.generate(beam, search.sampling_params, f"{request_id}-{place}", lora_request)
                for place, beam in enumerate(beams)
            ]
            search.advance(await gather_last(streams))
        yield search.request_output(request_id, await self.get_tokenizer())

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
        processor = await self._input_processor()
        chat = ChatPrompt(
            messages=messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs,
        )
        rendered = await asyncio.to_thread(processor.render_chat, chat)
        return rendered.text or "", rendered.token_ids

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedFeatureError("encode (pooling) is not built yet; use generate.", parameter="encode")

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests: their streams end with finish_reason "abort". An id that is not running means nothing.

        An id stands for all requests that carry it and for all n answers; also for one that still waits for the load.
        """
        await self._seat().abort([request_id] if isinstance(request_id, str) else list(request_id), internal=internal)

    def abort_soon(self, request_id: str | Iterable[str]) -> None:
        """As `abort`, from code that cannot await; call it on the loop."""
        self._seat_here().abort_soon([request_id] if isinstance(request_id, str) else list(request_id))

    def stop_requests(self, request_ids: Iterable[str]) -> None:
        """As `abort`, for the requests of every loop, from any thread, also while those loops are blocked.

        The engine hears of it at once, over its control channel; a stream ends when its loop turns.
        """
        ids = list(request_ids)
        for seat in self._seats():
            seat.stop_requests(ids)

    # State.

    @property
    def errored(self) -> bool:
        """No request can be served any more."""
        return self._own.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """Why, as a fresh exception."""
        return self._own.dead_error

    @property
    def is_running(self) -> bool:
        return self.facts is not None and not self.errored

    @property
    def re_attached(self) -> bool:
        """The engine was kept alive by an earlier kernel, and taken over."""
        return self._adopted is not None

    @property
    def facts(self) -> EngineCoreReadyResponse | None:
        """What was loaded; None until it is."""
        return next((seat.facts for seat in self._seats() if seat.facts is not None), None)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop whose client owns the engine; None until one has used it."""
        return self._own.loop

    @property
    def engine_core(self) -> EngineCoreClient:
        """The client that owns the engine."""
        return self._own.engine_core

    @property
    def output_processor(self) -> OutputProcessor:
        """Of the loop whose client owns the engine."""
        return self._own.output_processor

    @property
    def output_handler(self) -> "asyncio.Task[None] | None":
        """Of the loop whose client owns the engine."""
        return self._own.output_handler

    @property
    def running_engine(self) -> RunningEngine | None:
        """For others to attach to."""
        return self.engine_core.running_engine  # type: ignore[attr-defined]  # of AsyncMPClient

    @property
    def num_unfinished_requests(self) -> int:
        """Of all loops."""
        return sum(seat.output_processor.get_num_unfinished_requests() for seat in self._seats())

    def get_scheduler_stats(self) -> SchedulerStats | None:
        """The engine's state after the newest step that had something to say."""
        found = [stats for seat in self._seats() if (stats := seat.output_processor.scheduler_stats) is not None]
        return max(found, key=lambda stats: stats.step_counter, default=None)

    @property
    def health(self) -> EngineHealth:
        """ "ok", "slow" or "stuck", as far as it is known while somebody waits: see EngineHealth."""
        return max((seat.watch.health for seat in self._seats()), key=lambda health: health.seconds)

    def add_health_callback(self, callback: Callable[[EngineHealth], None]) -> None:
        """Call `callback` when the engine turns slow, stuck, or well again, as seen from the loop that owns it."""
        self._health_callbacks.append(callback)
        self._own.watch.listeners.append(callback)

    async def check_health(self) -> None:
        """EngineDeadError if the engine is gone; otherwise asks it."""
        if self.errored:
            raise self.dead_error
        await self.call_utility("check_health")

    async def get_tokenizer(self) -> Tokenizer | None:
        await self.ready()
        return self._seat().tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's generation_config says."""
        return (await self._input_processor()).default_sampling_params()

    async def special_tokens_in(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Special tokens whose text stands in a message: they are sent as the special token, not as text."""
        return (await self._input_processor()).special_tokens_in(messages)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, one of its allow-list; UtilityCallError carries what it raised."""
        return await self._seat().call_utility(method, *args)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's name; the engine minds it, not this coroutine
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on every worker; one result per worker."""
        results: list[Any] = await self.call_utility("collective_rpc", method, timeout, args, dict(kwargs or {}))
        return results

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if blocks are in use."""
        return bool(await self.call_utility("reset_prefix_cache"))

    async def get_stats(self) -> dict[str, Any]:
        """The engine's SchedulerStats now, as a dict."""
        stats: dict[str, Any] = await self.call_utility("get_stats")
        return stats

    async def get_request_progress(self) -> list[RequestProgress]:
        """Where those of this loop's requests stand that bring no tokens: the engine says so between two steps."""
        return await self._seat().get_request_progress()

    def stats_of(self, request_id: str) -> list[RequestStateStats]:
        """The times so far of running requests of any loop that carry this id, those of n answers in order."""
        return [stats for seat in self._seats() for stats in seat.output_processor.stats_of(request_id)]

    # Inside.

    async def _input_processor(self) -> InputProcessor:
        await self.ready()
        processor = self._seat().input_processor
        assert processor is not None
        return processor

    def _take_first_seat(self) -> LoopSeat:
        """The seat whose client starts the engine; everybody else's is attached to it."""
        engine = self._shared or self._adopted
        client = make_async_mp_client(self.args, self._executor_class, self.log_stats, engine=engine, keep=self._keep)
        for callback in self._progress_callbacks:
            client.add_progress_callback(callback)  # type: ignore[attr-defined]  # of AsyncMPClient
        seat = LoopSeat(self.args, client, self.log_stats)
        seat.watch.listeners += self._health_callbacks
        seat.stat_listeners = self.stat_listeners
        return seat

    def _seats(self) -> list[LoopSeat]:
        return [self._own, *list(self._guests.values())]

    def _seat_here(self) -> LoopSeat:
        """The running loop's seat, if it has one, else our own."""
        with contextlib.suppress(RuntimeError):  # no loop runs
            return self._guests.get(asyncio.get_running_loop(), self._own)
        return self._own

    def _seat(self) -> LoopSeat:
        """The running loop's seat; it takes one if it has none."""
        loop = asyncio.get_running_loop()
        self.engine_core.check_owner()  # type: ignore[attr-defined]  # of AsyncMPClient
        with self._lock:
            own = self._own
            own.loop = own.loop or loop
            if own.loop is loop:
                return own
            for ended in [one for one in self._guests if one.is_closed()]:
                self._guests.pop(ended).close()
            if loop in self._guests:
                return self._guests[loop]
            if own.errored:
                raise own.failure
            if own.loop.is_closed() and own.facts is None:  # it ended in the middle of the load, and the load with it
                own.close()
                self._own = self._take_first_seat()
                return self._own
            client = make_async_mp_client(self.args, None, self.log_stats, engine=self.running_engine)
            self._guests[loop] = LoopSeat(self.args, client, self.log_stats, own.tokenizer)
            return self._guests[loop]
