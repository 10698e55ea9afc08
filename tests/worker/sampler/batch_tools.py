"""Small helpers of the sampler's tests: one call for a whole batch, and logits that look like a model's."""

from collections.abc import Sequence
from typing import Any

import torch

from llmkernel.engine.worker.sampler import Sampler, SamplerOutput
from llmkernel.protocol.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def sample(
    logits: torch.Tensor,
    requests: Sequence[SamplingParams],
    outputs: Sequence[list[int]] | None = None,
    *,
    prompt: Sequence[int] = (),
    eos: int | None = None,
    bad_words: list[list[int]] | None = None,
    **options: Any,
) -> SamplerOutput:
    """Row i for request "i", in a new Sampler."""
    sampler = Sampler(logits.shape[1], CPU, **options)
    ids = [str(i) for i in range(len(requests))]
    for req_id, request in zip(ids, requests, strict=True):
        sampler.add(req_id, request, list(prompt), eos, bad_words)
    return sampler.sample(logits, ids, list(outputs) if outputs is not None else [[] for _ in ids])
