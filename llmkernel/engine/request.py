"""Request: one request as the scheduler sees it, from ADD to its last token."""

import enum
import time
from collections.abc import Callable
from typing import Any

from llmkernel.engine.speculative.drafting import Drafting
from llmkernel.engine.structured.structured_request import StructuredRequest
from llmkernel.protocol.outputs import EngineCoreEvent, EngineCoreEventType, FinishReason, LogprobsLists
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["HashNewBlocks", "Request", "RequestStatus"]


class RequestStatus(enum.IntEnum):
    """Where a request stands (vLLM's names). Everything after PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}

MOST_EVENTS = 64
"""Events from which on parts of a prefill are not recorded until those are told."""

HashNewBlocks = Callable[["Request"], None]
"""Appends to `request.block_hashes` the hashes of the blocks that `request.all_token_ids` fills by now."""


class Request:
    """One request: its tokens, how many of them have their KV computed, and what was not yet told to the client.

    all_token_ids: prompt, then output. num_computed_tokens: how many of them have (or will have, once the step that was
    scheduled last is through) their KV in the request's blocks. num_cached_tokens: prompt tokens taken from the prefix
    cache when it was first admitted, -1 before. block_hashes: one per full block, empty without prefix caching.
    stop_reason: the stop token's id, or the reason of an error. structured: the grammar that the answer has to follow.
    drafting: what speculation knows of it, None until it has had drafts.
    """

    __slots__ = (
        "_hash_new_blocks",
        "all_token_ids",
        "arrival_time",
        "bad_words_token_ids",
        "block_hashes",
        "cache_salt",
        "client_index",
        "drafting",
        "eos_token_id",
        "events",
        "known_to_worker",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prefill_told",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_token_ids",
        "stream_interval",
        "structured",
        "trace_headers",
        "unsent_logprobs",
        "unsent_prompt_logprobs",
        "unsent_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        client_index: int = 0,
        priority: int = 0,
        eos_token_id: int | None = None,
        bad_words_token_ids: list[list[int]] | None = None,
        cache_salt: str | None = None,
        trace_headers: dict[str, str] | None = None,
        structured: StructuredRequest | None = None,
        hash_new_blocks: HashNewBlocks | None = None,
    ) -> None:
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.sampling_params = sampling_params
        self.eos_token_id = eos_token_id
        self.bad_words_token_ids = bad_words_token_ids
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.structured = structured
        self.drafting: Drafting | None = None
        self.max_tokens = sampling_params.max_tokens
        self.min_tokens = sampling_params.min_tokens
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        self.stream_interval = sampling_params.stream_interval

        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.all_token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.status = (
            RequestStatus.WAITING if structured is None else RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        )
        self.stop_reason: int | str | None = None
        self.known_to_worker = False
        self.prefill_told = False

        self.events: list[EngineCoreEvent] = []
        self.unsent_token_ids: list[int] = []
        self.unsent_logprobs: list[LogprobsLists] = []
        self.unsent_prompt_logprobs: LogprobsLists | None = None
        self.block_hashes: list[bytes] = []
        self._hash_new_blocks = hash_new_blocks
        if hash_new_blocks is not None:
            hash_new_blocks(self)

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        hash_new_blocks: HashNewBlocks | None = None,
        structured: StructuredRequest | None = None,
    ) -> "Request":
        """The Request of a message that was checked before (see request_checks)."""
        assert request.prompt_token_ids is not None and request.sampling_params is not None
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            arrival_time=request.arrival_time,
            client_index=request.client_index,
            priority=request.priority,
            eos_token_id=request.eos_token_id,
            bad_words_token_ids=request.bad_words_token_ids,
            cache_salt=request.cache_salt,
            trace_headers=request.trace_headers,
            structured=structured,
            hash_new_blocks=hash_new_blocks,
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Every token of the prompt has to be computed by a step of its own request, until the first token is there."""
        return self.sampling_params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def skip_reading_prefix_cache(self) -> bool:
        return bool(self.sampling_params.skip_reading_prefix_cache) or self.needs_prompt_logprobs

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def is_prefill_chunk(self) -> bool:
        """The step scheduled last leaves tokens without KV, so it brings no new token."""
        return self.num_computed_tokens < len(self.all_token_ids)

    @property
    def reads_prompt(self) -> bool:
        """Its next step computes more than the token that it got last: a prompt, or a text that was preempted."""
        return self.num_output_tokens == 0 or self.num_computed_tokens < self.num_tokens - 1

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy; lower runs earlier."""
        return (self.priority, self.arrival_time, self.request_id)

    def append_output_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.unsent_token_ids.append(token_id)
        if self._hash_new_blocks is not None:
            self._hash_new_blocks(self)

    def record_event(self, kind: EngineCoreEventType, tokens: int = 0) -> None:
        self.events.append(EngineCoreEvent(kind, time.monotonic(), tokens))

    def record_chunk(self) -> None:
        """A step has read a part of the text; of a very long one only the first parts are told."""
        if len(self.events) < MOST_EVENTS:
            self.record_event(EngineCoreEventType.PREFILLED, self.num_computed_tokens)

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Events since the last call, None if there are none."""
        events, self.events = self.events, []
        return events or None

    def __repr__(self) -> str:
        details: dict[str, Any] = {
            "tokens": f"{self.num_prompt_tokens}+{self.num_output_tokens}",
            "computed": self.num_computed_tokens,
        }
        words = ", ".join(f"{name}={value}" for name, value in details.items())
        return f"Request({self.request_id!r}, {self.status.name}, {words})"
