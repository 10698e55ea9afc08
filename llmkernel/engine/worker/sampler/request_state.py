"""What the sampler keeps for one request between steps."""

import numpy as np
import torch

from llmkernel.engine.worker.sampler.draws import seed_key
from llmkernel.engine.worker.sampler.masks import banned_by_bad_words
from llmkernel.engine.worker.sampler.penalties import TokenCounts
from llmkernel.engine.worker.sampler.truncation import Truncation
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["RequestState"]


class RequestState:
    """One request's parameters in the form in which rows use them.

    seed: the effective one. cut: None for greedy. counts, bias, allowed: None where the feature is off. error: why the
    request cannot be sampled at all (None: it can); it is told at its first sample, so that it fails alone.
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
        self.seed, self.key = seed, seed_key(seed)
        self.logprobs = params.logprobs
        self.cut = None if params.is_greedy else _truncation(params, vocab_size)
        self.repetition, self.frequency = params.repetition_penalty, params.frequency_penalty
        self.presence = params.presence_penalty
        self.counts = self._make_counts(vocab_size, prompt_token_ids)
        self.bad_words = bad_words_token_ids or []
        self.min_tokens = params.min_tokens
        stops = [*(params.stop_token_ids or []), *([] if eos_token_id is None else [eos_token_id])]
        self.stop_ids = list(dict.fromkeys(stop for stop in stops if 0 <= stop < vocab_size))
        self.error = _unknown_ids(params, self.bad_words, vocab_size)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        self.allowed: torch.Tensor | None = None
        if self.error is None and params.logit_bias:
            self.bias = np.array(list(params.logit_bias), np.int64), np.array([*params.logit_bias.values()], np.float32)
        if self.error is None and params.allowed_token_ids is not None:
            self.allowed = torch.tensor(sorted(set(params.allowed_token_ids)), dtype=torch.int64, device=device)

    def banned(self, output_token_ids: list[int]) -> list[int]:
        """The tokens that min_tokens and bad_words forbid at this position."""
        banned = banned_by_bad_words(self.bad_words, output_token_ids) if self.bad_words else []
        return banned + self.stop_ids if len(output_token_ids) < self.min_tokens else banned

    def adjusts(self, output_token_ids: list[int]) -> bool:
        """Whether the logits of this position are changed at all before temperature."""
        if self.bias is not None or self.allowed is not None or self.counts is not None:
            return True
        return bool((self.bad_words or self.min_tokens) and self.banned(output_token_ids))

    def _make_counts(self, vocab_size: int, prompt_token_ids: list[int]) -> TokenCounts | None:
        if self.repetition != 1.0:
            return TokenCounts(vocab_size, prompt_token_ids)
        return TokenCounts(vocab_size, []) if self.frequency or self.presence else None


def _truncation(params: SamplingParams, vocab_size: int) -> Truncation:
    top_k = params.top_k if params.top_k < vocab_size else 0
    return Truncation(params.temperature, top_k, params.top_p, params.min_p)


def _unknown_ids(params: SamplingParams, bad_words: list[list[int]], vocab_size: int) -> str | None:
    """The sentence about the first parameter that names a token id outside the vocabulary."""
    named = (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", (token for word in bad_words for token in word)),
    )
    for name, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{name} names token id {token}, but the vocabulary is 0 to {vocab_size - 1}; leave that id out."
    return None
