"""What the sampler keeps of one request between steps."""

import numpy as np
import torch

from llmkernel.engine.worker.sampler.draws import seed_key
from llmkernel.engine.worker.sampler.masks import banned_by_bad_words
from llmkernel.engine.worker.sampler.penalties import Penalties, TokenCounts
from llmkernel.engine.worker.sampler.truncation import Truncation
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["RequestState"]


class RequestState:
    """One request's parameters in the form in which rows use them; None where a feature is off.

    params, prompt_token_ids: as they came. key: of its random stream. truncation: None = greedy. error: why the request
    cannot be sampled at all; it is told at the first sample, so that the request fails alone.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        device: torch.device,
        prompt_token_ids: list[int],
        eos_token_id: int | None,
        bad_words_token_ids: list[list[int]] | None,
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.key = seed_key(seed)
        self.error = _unknown_id(params, bad_words_token_ids, vocab_size)
        self.logprobs = params.num_logprobs
        self.logprob_ids: torch.Tensor | None = None
        if params.logprob_token_ids is not None and self.error is None:
            self.logprob_ids = torch.tensor(params.logprob_token_ids, dtype=torch.int64, device=device)
        self.prompt_logprobs = params.prompt_logprobs or 0
        self.truncation = _truncation(params, vocab_size)
        self.penalties = _penalties(params, vocab_size, prompt_token_ids)
        self.bias = _bias(params)
        self.allowed: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = torch.tensor(sorted(set(params.allowed_token_ids)), dtype=torch.int64, device=device)
        self._bad_words = [word for word in bad_words_token_ids or () if word]
        self._min_tokens = params.min_tokens
        stops = [*(params.stop_token_ids or ()), *(() if eos_token_id is None else (eos_token_id,))]
        self._stop_ids = list(dict.fromkeys(token for token in stops if 0 <= token < vocab_size))

    def looks_back(self, output_token_ids: list[int]) -> bool:
        """What may be drawn after these, and after what follows, depends on the tokens that were drawn before."""
        return self.penalties is not None or bool(self._bad_words) or len(output_token_ids) < self._min_tokens

    def held_stops(self, output_token_ids: list[int]) -> list[int]:
        """The tokens that min_tokens alone forbids after these."""
        return self._stop_ids if len(output_token_ids) < self._min_tokens else []

    def banned(self, output_token_ids: list[int]) -> list[int]:
        """The tokens that bad_words and min_tokens forbid after these."""
        banned = banned_by_bad_words(self._bad_words, output_token_ids) if self._bad_words else []
        return banned + self.held_stops(output_token_ids)


def _truncation(params: SamplingParams, vocab_size: int) -> Truncation | None:
    if params.is_greedy:
        return None
    return Truncation(
        1 / params.temperature, params.top_k if params.top_k < vocab_size else 0, params.top_p, params.min_p
    )


def _penalties(params: SamplingParams, vocab_size: int, prompt_token_ids: list[int]) -> Penalties | None:
    repetition, frequency, presence = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if repetition == 1 and not frequency and not presence:
        return None
    seen = prompt_token_ids if repetition != 1 else []
    return Penalties(TokenCounts(vocab_size, seen), repetition, frequency, presence)


def _bias(params: SamplingParams) -> tuple[np.ndarray, np.ndarray] | None:
    if not params.logit_bias:
        return None
    return np.array(list(params.logit_bias), np.int64), np.array(list(params.logit_bias.values()), np.float32)


def _unknown_id(params: SamplingParams, bad_words: list[list[int]] | None, vocab_size: int) -> str | None:
    """The sentence about the first parameter that names a token id outside the vocabulary."""
    named = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words": [token for word in bad_words or () for token in word],
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{name} names token id {token}, outside the vocabulary of 0 to {vocab_size - 1}; leave it out."
    return None
