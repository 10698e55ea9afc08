"""What a user gets back: RequestOutput and CompletionOutput, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

from llmkernel.llm.logprobs import PromptLogprobs, SampleLogprobs
from llmkernel.llm.stats import RequestStateStats
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["CompletionOutput", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    index: which of the n answers. text and token_ids: of the whole answer, or new since the last output (DELTA).
    cumulative_logprob: sum over the answer so far; logprobs: one dict per token id; both None unless asked for.
    finish_reason: None while it runs, then "stop", "length", "abort", "error" or "repetition".
    stop_reason: the stop string or stop token id that ended it, or the reason of an error. metrics: its times.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestStateStats | None = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, newer: "CompletionOutput") -> None:
        """Continue this delta with the next one."""
        self.text += newer.text
        self.token_ids.extend(newer.token_ids)
        if newer.logprobs:
            self.logprobs = (self.logprobs or []) + newer.logprobs
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """What is known, or what is new, of one request: see SamplingParams.output_kind.

    request_id: the id that the user gave or got. prompt: text, None if token ids were given. outputs: the answers
    that this output has something to say about, by index. prompt_logprobs: one dict per prompt token, None for the
    first; from the first token on, once where outputs are deltas. finished: no more outputs will come for this request.
    metrics: times and counts of the newest answer in `outputs`. num_cached_tokens: prompt tokens taken from the
    prefix cache. sampling_params: as they were sent: max_tokens and the effective seed filled in. Always true in a
    boolean context, empty text or not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    sampling_params: SamplingParams | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    def add(self, newer: "RequestOutput", *, aggregate: bool) -> None:
        """Take in a later output of the same request; aggregate: both are deltas, so join them instead of replacing."""
        self.finished |= newer.finished
        self.metrics = newer.metrics or self.metrics
        self.prompt_logprobs = newer.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens if newer.num_cached_tokens is None else newer.num_cached_tokens
        self.kv_transfer_params = newer.kv_transfer_params or self.kv_transfer_params
        for completion in newer.outputs:
            for position, known in enumerate(self.outputs):
                if known.index == completion.index:
                    if aggregate:
                        known.append(completion)
                    else:
                        self.outputs[position] = completion
                    break
            else:
                self.outputs.append(completion)
