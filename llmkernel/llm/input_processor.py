"""InputProcessor: from what a user says to an EngineCoreRequest, or to a refusal that says what to change."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.llm.bad_words import encode_bad_words
from llmkernel.llm.chat_template import ChatTemplate
from llmkernel.llm.prompts import ChatPrompt, PromptType, TokenizedPrompt, take_apart
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.logger import init_logger
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import EngineCoreRequest, LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["InputProcessor", "check_params"]

logger = init_logger(__name__)

_LONG_TEXT = 8192
"""Characters from which tokenising is worth a thread: below, it takes less time than the way there and back."""

MAX_PROMPT_ENTRIES = 2_000_000
"""Logprobs of a whole prompt over the whole vocabulary: each becomes an object, a microsecond and some 100 bytes."""


class InputProcessor:
    """Checks a request against the model that is loaded, and fills in what the engine needs to know.

    `tokenize` and `render_chat` may run in any thread; `process_inputs` is quick.
    """

    def __init__(self, args: EngineArgs, facts: EngineCoreReadyResponse, tokenizer: Tokenizer | None) -> None:
        self._args = args
        self._facts = facts
        self._tokenizer = tokenizer
        self._chat_templates: dict[str, ChatTemplate] = {}
        self._warned: set[str] = set()

    @staticmethod
    def is_long(prompt: PromptType | ChatPrompt) -> bool:
        """Whether tokenising this prompt should not happen on an event loop. A template may take its time, too."""
        if isinstance(prompt, ChatPrompt):
            return True
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return isinstance(text, str) and len(text) > _LONG_TEXT

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's generation_config says of sampling."""
        known = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}
        defaults = self._facts.model.generation_defaults
        return SamplingParams(**{name: value for name, value in defaults.items() if name in known})

    def tokenize(
        self, prompt: PromptType | ChatPrompt, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> TokenizedPrompt:
        """The prompt's ids.

        tokenization_kwargs: add_special_tokens (True), truncate_prompt_tokens (keep the last N).
        """
        if isinstance(prompt, ChatPrompt):
            return self.render_chat(prompt)
        options = dict(tokenization_kwargs or {})
        add_special_tokens = options.pop("add_special_tokens", True)
        keep = options.pop("truncate_prompt_tokens", None)
        if options:
            raise UnsupportedFeatureError(
                f"tokenization_kwargs {sorted(options)} are not built; known: add_special_tokens,"
                " truncate_prompt_tokens.",
                parameter="tokenization_kwargs",
            )
        text, ids, salt = take_apart(prompt)
        if ids is None:
            assert text is not None
            ids = self._require_tokenizer().encode(text, add_special_tokens=add_special_tokens)
        if keep is not None:
            if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens = {keep!r} must be an integer of at least 1.",
                    parameter="truncate_prompt_tokens",
                    value=keep,
                )
            ids = ids[-keep:]
        return TokenizedPrompt(text, ids, salt)

    def render_chat(self, chat: ChatPrompt) -> TokenizedPrompt:
        """Text and ids of a conversation; the template writes the special tokens, so encoding adds none."""
        tokenizer = self._require_tokenizer()
        source = self._template_source(chat)
        if not source:
            raise InvalidRequestError(
                f"{self._facts.model.name} has no chat template (a base model?): send the text as it is (--raw, or"
                " generate()), or give a template (--template, or chat_template=...).",
                parameter="chat_template",
            )
        if any(callable(tool) for tool in chat.tools or ()):
            raise UnsupportedFeatureError(
                "tools must be given as JSON schemas (dicts); functions are not built.", parameter="tools"
            )
        template = self._chat_templates.get(source)
        if template is None:
            template = self._chat_templates[source] = ChatTemplate(source, tokenizer.facts.special_tokens)
        text = template.render(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            tools=chat.tools,
            documents=chat.documents,
            **(chat.variables or {}),
        )
        return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))

    def _template_source(self, chat: ChatPrompt) -> str | None:
        """The template given, by its text or its name; else the model's: for tools a special one, if there is one."""
        facts = self._require_tokenizer().facts
        named: dict[str, str | None] = dict(facts.named_chat_templates)
        if named:
            named["default"] = facts.chat_template
        if chat.chat_template:
            return named.get(chat.chat_template, chat.chat_template)
        return named.get("tool_use", facts.chat_template) if chat.tools is not None else facts.chat_template

    def special_tokens_in(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Special tokens whose text stands in a message: they will be encoded as the special token."""
        texts = [content for message in messages if isinstance(content := message.get("content"), str)]
        special = self._require_tokenizer().special_texts
        return [token for token in special if token and any(token in text for text in texts)]

    def process_inputs(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> EngineCoreRequest:
        """The request as it is sent: internal id, max_tokens, seed and stop ids filled in; `params` stays as it is."""
        params = self._check_features(params, lora_request, trace_headers, priority, data_parallel_rank)
        self._check_prompt(prompt.token_ids)
        self._check_params(params, len(prompt.token_ids))
        sent = params.clone()
        room = self._facts.max_model_len - len(prompt.token_ids)
        sent.max_tokens = room if sent.max_tokens is None else min(sent.max_tokens, room)
        sent.min_tokens = min(sent.min_tokens, sent.max_tokens)
        if sent.seed is None:
            sent.seed = self._args.seed if self._args.seed is not None else secrets.randbits(32)
        eos_token_id = None if sent.ignore_eos else self._facts.tokenizer.eos_token_id
        if not sent.ignore_eos:
            own = [token_id for token_id in self._facts.model.stop_token_ids if token_id != eos_token_id]
            sent.stop_token_ids = list(dict.fromkeys([*(sent.stop_token_ids or ()), *own])) or None
        return EngineCoreRequest(
            request_id=f"{request_id}-{secrets.token_hex(4)}",
            prompt_token_ids=prompt.token_ids,
            mm_features=None,
            sampling_params=sent,
            pooling_params=None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            lora_request=None,
            cache_salt=prompt.cache_salt,
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            external_req_id=request_id,
            eos_token_id=eos_token_id,
            bad_words_token_ids=self._bad_words(sent),
        )

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "This model has no tokenizer; send token ids instead of text.", parameter="prompt"
            )
        return self._tokenizer

    def _check_features(
        self,
        params: SamplingParams | PoolingParams,
        lora_request: LoRARequest | None,
        trace_headers: Mapping[str, str] | None,
        priority: int,
        data_parallel_rank: int | None,
    ) -> SamplingParams:
        sampling_params = check_params(params)
        if lora_request is not None:
            raise UnsupportedFeatureError("lora_request is not built yet; leave it out.", parameter="lora_request")
        if data_parallel_rank not in (None, 0):
            raise InvalidRequestError(
                f"data_parallel_rank = {data_parallel_rank!r} must be 0 or None: this engine has one rank.",
                parameter="data_parallel_rank",
                value=data_parallel_rank,
            )
        if trace_headers:
            self._warn_once("trace_headers are dropped: tracing is off.")
        if priority and self._facts.scheduling_policy != "priority":
            self._warn_once("priority has no effect: load the model with scheduling_policy='priority'.")
        return sampling_params

    def _check_prompt(self, ids: list[int]) -> None:
        limit, pool = self._facts.max_model_len, self._facts.kv_cache_size_tokens
        if not ids:
            raise InvalidRequestError("The prompt is empty; give at least one token.", parameter="prompt")
        if len(ids) >= limit:
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens, and the model takes {limit} with at least one of the answer;"
                f" shorten it to {limit - 1}, or load the model with a larger max_model_len.",
                parameter="prompt",
            )
        if pool and len(ids) >= pool:
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens, and the KV cache holds {pool}; shorten it, or load the model with a"
                " larger kv_cache_memory.",
                parameter="prompt",
            )
        self._check_ids("prompt_token_ids", ids)

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        if params.structured_outputs is not None and self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and this model has none; leave it out.",
                parameter="structured_outputs",
            )
        entries = num_prompt_tokens * self._facts.model.vocab_size
        if params.prompt_logprobs == -1 and entries > MAX_PROMPT_ENTRIES:
            raise InvalidRequestError(
                f"prompt_logprobs = -1 means {entries} entries for this prompt, and {MAX_PROMPT_ENTRIES} are allowed;"
                " ask for at most 20 per token, or shorten the prompt.",
                parameter="prompt_logprobs",
                value=-1,
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
            ("logit_bias", list(params.logit_bias or ())),
        ):
            self._check_ids(name, ids or [])

    def _check_ids(self, name: str, ids: list[int]) -> None:
        size = self._facts.model.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise InvalidRequestError(
                f"{name} holds {wrong}; ids of this model go from 0 to {size - 1}.", parameter=name, value=wrong
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]] | None:
        if not params.bad_words:
            return None
        sequences = encode_bad_words(self._require_tokenizer(), params.bad_words)
        for ids in sequences:
            self._check_ids("bad_words", ids)
        return sequences

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def check_params(params: object) -> SamplingParams:
    """`params` if they are SamplingParams; PoolingParams and anything else are refused by name."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, PoolingParams):
        raise UnsupportedFeatureError(
            "Pooling (PoolingParams) is not built yet; use SamplingParams.", parameter="params"
        )
    raise InvalidRequestError(
        f"params must be SamplingParams, not {type(params).__name__}.", parameter="params", value=params
    )
