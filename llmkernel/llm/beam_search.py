"""Beam search on top of one-token requests (vLLM's way): the prefix cache makes each of them short.

A beam's score is its cumulative logprob / (tokens, prompt included, without a last end token) ** length_penalty.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from llmkernel.errors import InvalidRequestError, RequestFailedError
from llmkernel.llm.logprobs import SampleLogprobs
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.prompts import TokenizedPrompt
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSearchSequence", "gather_last"]


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam (vLLM's fields). tokens and text: the prompt is part of them. logprobs: of each generated token.

    finish_reason: None while it grows, then "stop" (stop_reason is the end token's id) or "length".
    """

    tokens: list[int]
    logprobs: SampleLogprobs
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences for one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """The beams of one prompt. While `prompts` has some, have them generated with `sampling_params`, and `advance`.

    There are as many steps as max_tokens or the context allow; ended beams keep their place in the ranking.
    """

    def __init__(self, prompt: TokenizedPrompt, params: BeamSearchParams, facts: EngineCoreReadyResponse) -> None:
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(
                f"params must be BeamSearchParams, not {type(params).__name__}.", parameter="params", value=params
            )
        self._prompt = prompt
        self._params = params
        self._ends = frozenset(
            token_id
            for token_id in (facts.tokenizer.eos_token_id, *facts.model.stop_token_ids)
            if token_id is not None and not params.ignore_eos
        )
        # At least one, so that a prompt without room is refused as any other request would be.
        self._steps = max(1, min(params.max_tokens, facts.max_model_len - len(prompt.token_ids)))
        self._live = [BeamSearchSequence(list(prompt.token_ids), [])]
        self._completed: list[BeamSearchSequence] = []

    @property
    def sampling_params(self) -> SamplingParams:
        """Of every step's requests."""
        return SamplingParams(
            logprobs=2 * self._params.beam_width,
            max_tokens=1,
            temperature=self._params.temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def prompts(self) -> list[dict[str, object]]:
        """The beams that grow, as prompts; [] when the search is over."""
        if self._steps <= 0:
            return []
        return [{"prompt_token_ids": beam.tokens, "cache_salt": self._prompt.cache_salt} for beam in self._live]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in what was generated for `prompts`, in their order. RequestFailedError if one of them failed."""
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(self._live, outputs, strict=True):
            answer = output.outputs[0]
            if not answer.logprobs:
                raise RequestFailedError(
                    f"Beam search ended early ({answer.finish_reason}): {answer.stop_reason}",
                    request_id=output.request_id,
                )
            for token_id, entry in answer.logprobs[0].items():
                new = BeamSearchSequence(
                    [*beam.tokens, token_id],
                    [*beam.logprobs, answer.logprobs[0]],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                )
                if token_id not in self._ends:
                    grown.append(new)
                    continue
                new.finish_reason, new.stop_reason = "stop", token_id
                if not self._params.include_stop_str_in_output:
                    new.tokens.pop()
                self._completed.append(new)
        self._live = sorted(grown, key=self._score, reverse=True)[: self._params.beam_width]
        self._steps -= 1

    def sequences(self, tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
        """The best of all beams, best first."""
        for beam in self._live:
            beam.finish_reason = "length"
        best = sorted(self._completed + self._live, key=self._score, reverse=True)[: self._params.beam_width]
        for beam in best:
            beam.text = self._decode(tokenizer, beam.tokens)
        return best

    def request_output(self, request_id: str, tokenizer: Tokenizer | None) -> RequestOutput:
        """The same as a RequestOutput: an answer for each beam, without the prompt."""
        length = len(self._prompt.token_ids)
        answers = [
            CompletionOutput(
                index,
                self._decode(tokenizer, beam.tokens[length:]) or "",
                beam.tokens[length:],
                beam.cum_logprob,
                beam.logprobs,
                beam.finish_reason,
                beam.stop_reason,
            )
            for index, beam in enumerate(self.sequences(tokenizer))
        ]
        return RequestOutput(
            request_id, self._prompt.text, list(self._prompt.token_ids), outputs=answers, finished=True
        )

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self._ends)
        return float(beam.cum_logprob / length**self._params.length_penalty)

    def _decode(self, tokenizer: Tokenizer | None, token_ids: list[int]) -> str | None:
        if tokenizer is None:
            return None
        return tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)


async def gather_last(streams: Sequence[AsyncIterator[RequestOutput]]) -> list[RequestOutput]:
    """The last output of each stream, all read at once; if one raises, or this is cancelled, the others are left."""
    tasks = [asyncio.ensure_future(_last(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]
