"""RequestState: what the front end keeps of one running request."""

import time
from collections.abc import Sequence
from typing import Any

from llmkernel.errors import UnsupportedFeatureError
from llmkernel.llm.detokenizer import IncrementalDetokenizer
from llmkernel.llm.logprobs import LogprobsProcessor
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.request_way import RequestWay
from llmkernel.llm.stats import RequestStateStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.outputs import EngineCoreOutput, FinishReason
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestState"]


class RequestState:
    """One request of the engine (of n answers, one): its text, its numbers, and the queue that its outputs go to.

    request_id: internal; external_req_id: what the user sees. queue None: outputs are returned by process_outputs.
    prompt: the text, where there was one; it stays on this side.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        tokenizer: Tokenizer | None,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
        log_stats: bool = True,
        stream_interval: int = 1,
    ) -> None:
        params = request.sampling_params
        assert params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids or []
        self.params: SamplingParams = params
        self.output_kind = params.output_kind
        self._delta = params.output_kind == RequestOutputKind.DELTA
        self._final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
        self.parent_req = parent_req
        self.request_index = request_index
        self.queue = queue
        self.lora_request = request.lora_request
        self._end_ids = {request.eos_token_id, *(params.stop_token_ids or ())}
        self.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self.logprobs = LogprobsProcessor(tokenizer, params)
        self.stats: RequestStateStats | None = None
        if log_stats:
            self.stats = RequestStateStats(
                arrival_time=request.arrival_time,
                num_prompt_tokens=len(self.prompt_token_ids),
                way=RequestWay.since(request.arrival_time),
            )
        self.num_cached_tokens: int | None = None
        self.stream_interval = max(stream_interval, params.stream_interval or 1)
        self._unsent: list[int] = []
        self._sent_any = False

    @classmethod
    def from_new_request(
        cls,
        tokenizer: Tokenizer | None,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> "RequestState":
        """vLLM's constructor."""
        return cls(
            request,
            tokenizer=tokenizer,
            prompt=prompt,
            parent_req=parent_req,
            request_index=request_index,
            queue=queue,
            log_stats=log_stats,
            stream_interval=stream_interval,
        )

    def sent(self) -> None:
        """Its ADD is out."""
        if self.stats is not None:
            self.stats.way.sent = time.monotonic()

    def take(self, output: EngineCoreOutput) -> tuple[list[int], str | None]:
        """Decode a step's tokens: those that belong to the answer, and the stop string that ends it, if one does."""
        reason = output.finish_reason
        before = len(self.detokenizer.token_ids)
        # What ends a grammar's answer is mostly no stop token, but its last word.
        ended = reason == FinishReason.STOP and output.new_token_ids[-1:] and output.new_token_ids[-1] in self._end_ids
        stop = self.detokenizer.update(output.new_token_ids, bool(ended))
        if stop is None and reason is not None:
            stop = self.detokenizer.flush()
        kept = self.detokenizer.token_ids[before:]
        if output.new_prompt_logprobs_tensors is not None:
            self.logprobs.take_prompt(output.new_prompt_logprobs_tensors, self.prompt_token_ids)
        if output.new_logprobs is not None:
            self.logprobs.update(output.new_logprobs, len(kept), self.detokenizer.token_ids)
        return kept, stop

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: object = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        num_cached_tokens: int | None = None,
    ) -> RequestOutput | None:
        """What the user gets to see now; None if that is nothing (FINAL_ONLY, stream_interval, nothing new)."""
        if pooling_output is not None:
            raise UnsupportedFeatureError("Pooling is not built yet; use SamplingParams.", parameter="pooling_output")
        if num_cached_tokens is not None:
            self.num_cached_tokens = num_cached_tokens
        finished = finish_reason is not None
        self._unsent += new_token_ids
        if not finished:
            due = len(self._unsent) >= self.stream_interval or (self._unsent and not self._sent_any)
            if self._final_only or not due:
                return None
        completion = self._completion(finish_reason, stop_reason)
        outputs, all_finished = [completion], finished
        if self.parent_req is not None:
            outputs = self.parent_req.take_output(self.request_id, completion)
            all_finished = self.parent_req.finished
            if not outputs:
                return None
        made = self._request_output(outputs, finished=all_finished)
        made.kv_transfer_params = kv_transfer_params
        return made

    def snapshot(self) -> RequestOutput:
        """All text and tokens so far, whatever the output kind: for an error to carry. Ends the decoding."""
        self.detokenizer.flush()
        completion = CompletionOutput(
            self.request_index,
            self.detokenizer.output_text,
            list(self.detokenizer.token_ids),
            logprobs=list(self.logprobs.logprobs) if self.logprobs.logprobs is not None else None,
            cumulative_logprob=self.logprobs.cumulative_logprob,
        )
        earlier = self.parent_req.aggregated if self.parent_req is not None else []
        return self._request_output([*earlier, completion], finished=False)

    def failed_output(self, reason: str) -> RequestOutput:
        """The last output of a request whose processing failed: what was known before, as it stands."""
        completion = CompletionOutput(
            self.request_index,
            self.detokenizer.output_text,
            list(self.detokenizer.token_ids),
            finish_reason=str(FinishReason.ERROR),
            stop_reason=reason,
        )
        return self._request_output([completion], finished=True)

    def _completion(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput:
        new, self._unsent, self._sent_any = self._unsent, [], True
        logprobs = self.logprobs
        if self._delta:
            token_ids, first = new, len(self.detokenizer.token_ids) - len(new)
        else:
            token_ids, first = self.detokenizer.token_ids[:], 0
        return CompletionOutput(
            self.request_index,
            self.detokenizer.next_text(finished=finish_reason is not None, delta=self._delta),
            token_ids,
            logprobs.cumulative_logprob,
            logprobs.logprobs[first:] if logprobs.logprobs is not None else None,
            str(finish_reason) if finish_reason is not None else None,
            stop_reason,
            self.stats,
        )

    def _request_output(self, outputs: Sequence[CompletionOutput], *, finished: bool) -> RequestOutput:
        prompt_logprobs = self.logprobs.prompt_logprobs
        if self._delta:
            self.logprobs.prompt_logprobs = None  # told once
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=list(outputs),
            finished=finished,
            metrics=self.stats,
            lora_request=self.lora_request,
            num_cached_tokens=self.num_cached_tokens,
            sampling_params=self.parent_req.sampling_params if self.parent_req is not None else self.params,
        )
