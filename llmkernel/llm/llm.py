"""LLM: prompts in, answers out, in blocking calls."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from llmkernel.config import DEFAULT_MODEL, EngineArgs, format_bytes
from llmkernel.errors import (
    EngineDeadError,
    GenerationInterrupted,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from llmkernel.llm.beam_search import BeamSearch, BeamSearchOutput
from llmkernel.llm.engine_watch import EngineHealth
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_batch import RequestBatch
from llmkernel.llm.shared_engine import resolve_engine
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["LLM"]


class LLM:
    """A model in an engine process of its own. `LLM(model, **engine_args)`; see EngineArgs for the options.

    `LLM(engine=...)` shares an engine that runs: that of an AsyncLLM, an LLM or an LLMEngine, or the pid of one. Its
    model comes with it; it goes on when this LLM is shut down, and ends with its owner.

    Loading blocks, and says in one line what memory the model takes; a load or a call that waits for an engine that
    does not answer says so after 5 s (quiet=True: neither). Works in scripts without a
    __main__ guard, in notebook cells, and from several threads. Every call owns its requests: it returns the answers
    to its own prompts in their order, and if it is interrupted it aborts its own.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        engine: object = None,
        executor_class: str | None = None,
        quiet: bool = False,
        **engine_args: Any,
    ) -> None:
        on_health = None if quiet else _say_when_stuck
        if engine is None:
            args = EngineArgs.from_options(model, **engine_args)
            self.llm_engine = LLMEngine(args, executor_class=executor_class, on_health=on_health)
        else:
            self.llm_engine = _attached(engine, model, executor_class, engine_args, on_health)
        self._step_lock = threading.Lock()
        if not quiet and engine is None:
            _say(self._describe_memory())

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The answers to one or many prompts, all at once in the engine, in the order of the prompts.

        sampling_params: for all, or one for each prompt; None = the model's own defaults. A request that failed alone
        has finish_reason "error" and its reason as stop_reason. KeyboardInterrupt becomes GenerationInterrupted with
        what there is of the answers in `.partial`; the engine goes on.
        """
        if use_tqdm:
            raise UnsupportedFeatureError("use_tqdm is not built; use stream() to see progress.", parameter="use_tqdm")
        return self._run(_as_list(prompts), sampling_params, lora_request, tokenization_kwargs, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation [{"role": ..., "content": ...}, ...] or a list of them."""
        if use_tqdm:
            raise UnsupportedFeatureError("use_tqdm is not built; use stream() to see progress.", parameter="use_tqdm")
        chats = _chats(messages, chat_template, add_generation_prompt, tools, documents, chat_template_kwargs)
        return self._run(chats, sampling_params, lora_request, None, priority)

    def stream(
        self,
        prompts: PromptType | ChatPrompt | Sequence[PromptType | ChatPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """Outputs as they come, of all prompts mixed; request_id is the prompt's position, as text.

        Each holds what SamplingParams.output_kind says (default: the whole text so far). Leaving the loop early
        aborts what is unfinished.
        """
        items = _as_list(prompts)
        params = self._one_each("sampling_params", sampling_params, len(items))
        with RequestBatch(self.llm_engine, self._step_lock) as batch:
            self._submit(batch, items, params, priority)
            for position, output in batch.outputs():
                output.request_id = str(position)
                yield output

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """As `stream`, for one conversation or a list of them."""
        chats = _chats(messages, chat_template, add_generation_prompt, tools, documents, chat_template_kwargs)
        return self.stream(chats, sampling_params, priority=priority)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences for each prompt, best first. concurrency_limit: prompts that are searched at once."""
        if use_tqdm:
            raise UnsupportedFeatureError("use_tqdm is not built; leave it out.", parameter="use_tqdm")
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(
                f"concurrency_limit = {concurrency_limit} must be at least 1, or None.", parameter="concurrency_limit"
            )
        processor, items = self.llm_engine.input_processor, _as_list(prompts)
        searches = [BeamSearch(processor.tokenize(prompt), params, self.llm_engine.facts) for prompt in items]
        at_once = concurrency_limit or max(1, len(searches))
        for start in range(0, len(searches), at_once):
            some = searches[start : start + at_once]
            while growing := [(search, beams) for search in some if (beams := search.prompts)]:
                beams = [beam for _, beams in growing for beam in beams]
                outputs = iter(self._run(beams, growing[0][0].sampling_params, lora_request, None, 0))
                for search, own in growing:
                    search.advance([next(outputs) for _ in own])
        return [BeamSearchOutput(search.sequences(self.get_tokenizer())) for search in searches]

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's generation_config says."""
        return self.llm_engine.input_processor.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if blocks are in use."""
        return self.llm_engine.reset_prefix_cache()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on every worker; one result per worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self, timeout: float = 5.0) -> int:
        """End the engine; idempotent. Returns the bytes of memory that its process held."""
        return self.llm_engine.shutdown(timeout)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("encode")

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("embed")

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("classify")

    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward")

    def score(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("score")

    def _run(
        self,
        prompts: Sequence[PromptType | ChatPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        each = self._one_each("sampling_params", sampling_params, len(prompts))
        final = [_final_only(params) for params in each]
        answers: dict[int, RequestOutput] = {}
        with RequestBatch(self.llm_engine, self._step_lock) as batch:
            try:
                self._submit(batch, prompts, final, priority, lora_request, tokenization_kwargs)
                for position, output in batch.outputs():
                    answers[position] = output
            except KeyboardInterrupt as interrupt:
                batch.abort()
                raise GenerationInterrupted(
                    f"Generation interrupted: {len(answers)} of {len(prompts)} answers were finished; see .partial.",
                    partial=[answers.get(at) or batch.last_output(at) for at in range(len(prompts))],
                ) from interrupt
            except EngineDeadError as error:
                error.partial = [answers.get(at) or batch.last_output(at) for at in range(len(prompts))]
                raise
        return [answers[position] for position in range(len(prompts))]

    def _submit(
        self,
        batch: RequestBatch,
        prompts: Sequence[PromptType | ChatPrompt],
        sampling_params: Sequence[SamplingParams],
        priority: int | Sequence[int],
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(prompts):
            raise InvalidRequestError(
                f"priority has {len(priorities)} items for {len(prompts)} prompts; give one for each, or one for all.",
                parameter="priority",
            )
        for prompt, params, rank in zip(prompts, sampling_params, priorities, strict=True):
            batch.submit(
                prompt,
                params,
                priority=rank,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
            )

    def _one_each(
        self, name: str, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, Sequence):
            if len(params) != count:
                raise InvalidRequestError(
                    f"{name} has {len(params)} items for {count} prompts; give one for each, or one for all.",
                    parameter=name,
                )
            return list(params)
        return [params] * count

    def _describe_memory(self) -> str:
        facts = self.llm_engine.facts
        return (
            f"{facts.model.name} takes {format_bytes(facts.model.weights_bytes)} for weights and"
            f" {format_bytes(facts.kv_cache_bytes)} for {facts.kv_cache_size_tokens} tokens of KV cache, in process"
            f" {facts.pid}, until shutdown()."
        )


def _chats(
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    chat_template: str | None,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> list[ChatPrompt]:
    """One conversation, or a list of them, as prompts."""
    many = bool(messages) and isinstance(messages, Sequence) and not isinstance(messages[0], Mapping)
    return [
        ChatPrompt(
            messages=conversation,  # type: ignore[arg-type]  # checked when it is rendered
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=variables,
        )
        for conversation in (messages if many else [messages])
    ]


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many: a str, a dict and a list of ints are one."""
    if isinstance(prompts, (str, Mapping, ChatPrompt)):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError as error:
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}.", parameter="prompts"
        ) from error
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _final_only(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        return params  # refused by name when it is submitted
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"llmkernel: {line}\n")


def _say_when_stuck(health: EngineHealth) -> None:
    if health.state == "stuck":
        _say(f"the engine is {health}; Ctrl-C ends this call, shutdown() the engine.")


def _refuse(name: str) -> NoReturn:
    raise UnsupportedFeatureError(f"{name} is not built yet; use generate, chat or stream.", parameter=name)


def _attached(
    engine: object,
    model: str,
    executor_class: str | None,
    engine_args: Mapping[str, Any],
    on_health: Callable[[EngineHealth], None] | None,
) -> LLMEngine:
    running, args = resolve_engine(engine)
    asked = list(engine_args) + ["model"] * (model not in (DEFAULT_MODEL, args.model))
    asked += ["executor_class"] * (executor_class is not None)
    if asked:
        raise InvalidRequestError(
            f"engine= shares {args.model} as it was loaded; leave out {', '.join(asked)}, or load without engine=.",
            parameter=asked[0],
        )
    return LLMEngine(args, engine=running, on_health=on_health)
