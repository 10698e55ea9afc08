"""Requests for an EngineCore that is measured without sockets: prompts without a common prefix, greedy answers."""

import time

import numpy as np

from llmkernel.engine.core import EngineCore
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["add_requests", "greedy", "random_prompts"]


def random_prompts(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Prompts without a common prefix; the same ones in every run."""
    rng = np.random.default_rng(batch)
    return rng.integers(1000, vocab_size, (batch, context)).tolist()


def greedy(tokens: int) -> SamplingParams:
    """Exactly `tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


def add_requests(core: EngineCore, batch: int, context: int, tokens: int) -> None:
    """`batch` requests of `context` prompt tokens that will each be answered with exactly `tokens` tokens."""
    for index, prompt in enumerate(random_prompts(batch, context, core.ready.model.vocab_size)):
        request = EngineCoreRequest(
            request_id=f"{batch}-{index}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=greedy(tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(core.preprocess_add_request(request))
