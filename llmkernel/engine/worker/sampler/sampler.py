"""Sampler: the tokens of a step from its logits, each row by the parameters of its own request."""

import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.worker.logits_processors.seat import ProcessorSeat
from llmkernel.engine.worker.sampler.chunks import Scratch
from llmkernel.engine.worker.sampler.logprobs import LogprobsMode, gather_logprobs
from llmkernel.engine.worker.sampler.request_state import RequestState
from llmkernel.engine.worker.sampler.row import Row
from llmkernel.engine.worker.sampler.step import SamplerStep
from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["Place", "PlacesOutput", "Sampler", "SamplerOutput"]


@dataclasses.dataclass(slots=True)
class SamplerOutput:
    """What a step drew. token_ids: one per row, -1 = failed. logprobs, errors: by request id, where there are any."""

    token_ids: list[int]
    logprobs: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


class Place(NamedTuple):
    """Where a token is drawn: behind `ahead` unknown tokens after all that the request has generated.

    words: what its grammar allows there (int32, see GrammarMasks), None = anything.
    """

    req_id: str
    output_token_ids: list[int]
    ahead: int = 0
    words: np.ndarray | None = None


class PlacesOutput(NamedTuple):
    """What was drawn. token_ids: one per place, -1 = failed. logprobs, errors: by place, where there are any."""

    token_ids: list[int]
    logprobs: dict[int, LogprobsLists]
    errors: dict[int, str]


class Sampler:
    """Owns what must be known of each request between add() and remove(). One thread uses it.

    vocab_size: columns of the logits. default_seed: of requests that name none; None = a fresh seed for each.
    processors: custom logits processors, applied in this order.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        default_seed: int | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        processors: Sequence[ProcessorSeat] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._default_seed = default_seed
        self._logprobs_mode = logprobs_mode
        self._processors = processors
        self._fresh = random.SystemRandom()
        self._requests: dict[str, RequestState] = {}
        self._scratch = Scratch(device)

    def add(
        self,
        req_id: str,
        params: SamplingParams,
        prompt_token_ids: list[int],
        eos_token_id: int | None,
        bad_words_token_ids: list[list[int]] | None,
    ) -> None:
        """Begin a request; a known id begins anew. Wrong token ids are told as an error of its first sample.

        InvalidRequestError from a custom logits processor that does not take it.
        """
        for processor in self._processors:
            processor.validate(params)
        seed = params.seed if params.seed is not None else self._default_seed
        self._requests[req_id] = RequestState(
            params,
            self._fresh.getrandbits(63) if seed is None else seed,
            self._vocab_size,
            self._device,
            prompt_token_ids,
            eos_token_id,
            bad_words_token_ids,
        )

    @torch.inference_mode()
    def prompt_logprobs(self, req_id: str, logits: torch.Tensor, token_ids: list[int]) -> LogprobsLists:
        """Of the request's prompt: row i of `logits` is what the model says in front of token_ids[i].

        Never processed: nothing of a prompt is drawn.
        """
        chosen = torch.tensor(token_ids, device=logits.device)
        count = self._requests[req_id].prompt_logprobs
        return gather_logprobs(logits, chosen, count, normalise=self._logprobs_mode.endswith("logprobs"))

    def remove(self, req_id: str) -> None:
        """Forget a request; an unknown id is let pass."""
        self._requests.pop(req_id, None)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        req_ids: list[str],
        output_token_ids: list[list[int]],
        grammar: GrammarMasks | None = None,
    ) -> SamplerOutput:
        """One token per row of `logits` [rows, vocab] (any float type, left as they are); row i belongs to req_ids[i].

        output_token_ids[i]: everything that request has generated; how many they are is the position of the draw. It
        must have been added. grammar: what the grammars of this step allow, for the requests that have one.
        """
        places = [
            Place(req_id, output, words=grammar.of(req_id) if grammar is not None else None)
            for req_id, output in zip(req_ids, output_token_ids, strict=True)
        ]
        drawn = self.sample_places(logits, places)
        return SamplerOutput(
            drawn.token_ids,
            {req_ids[place]: lists for place, lists in drawn.logprobs.items()},
            {req_ids[place]: reason for place, reason in drawn.errors.items()},
        )

    @torch.inference_mode()
    def sample_places(self, logits: torch.Tensor, places: Sequence[Place]) -> PlacesOutput:
        """One token per row of `logits` (see sample); row i is for places[i].

        Several places of one request in one call must not look back.
        """
        rows = [
            Row(index, self._requests[place.req_id], place.output_token_ids, place.words, place.ahead)
            for index, place in enumerate(places)
        ]
        step = SamplerStep(logits, rows, self._scratch, self._logprobs_mode, self._processors)
        step.run()
        return PlacesOutput(step.token_ids, step.logprobs(), step.errors)

    def looks_back(self, req_id: str, output_token_ids: list[int]) -> bool:
        """A token of this request cannot be drawn before the one in front of it is known."""
        return bool(self._processors) or self._requests[req_id].looks_back(output_token_ids)
