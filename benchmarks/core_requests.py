"""Requests for an EngineCore that is measured without sockets: prompts without a common prefix, greedy answers."""

import time

from benchmarks.decode import greedy, random_prompts
from llmkernel.engine.core import EngineCore
from llmkernel.protocol.requests import EngineCoreRequest

__all__ = ["add_requests"]


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
