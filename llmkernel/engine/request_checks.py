"""What the engine refuses at the door, for one request alone."""

import dataclasses
from collections.abc import Iterable

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["RequestLimits", "check_request"]


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a request has to fit into. max_model_len: tokens, prompt and output. num_blocks: KV blocks of the pool."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int


def check_request(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """InvalidRequestError that says what to change, UnsupportedFeatureError for what is not built."""
    _refuse_unbuilt(request)
    _check_prompt(request.prompt_token_ids or [], limits)
    assert request.sampling_params is not None
    _check_token_ids(request, request.sampling_params, limits.vocab_size)


def _refuse_unbuilt(request: EngineCoreRequest) -> None:
    unbuilt = {
        "pooling_params": request.pooling_params is not None,
        "lora_request": request.lora_request is not None,
        "mm_features": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None,
        "data_parallel_rank": request.data_parallel_rank not in (None, 0),
        "resumable": request.resumable,
    }
    for name, asked in unbuilt.items():
        if asked:
            raise UnsupportedFeatureError(f"{name} is not built yet; leave it out.", parameter=name)
    if request.sampling_params is None:
        raise InvalidRequestError("The request has no sampling_params; give it some.", parameter="sampling_params")
    if request.sampling_params.n != 1:
        raise InvalidRequestError(
            f"n = {request.sampling_params.n}: the engine writes one answer per request; send one request per answer.",
            parameter="n",
            value=request.sampling_params.n,
        )


def _check_prompt(prompt: list[int], limits: RequestLimits) -> None:
    length, name = len(prompt), "prompt_token_ids"
    if length == 0:
        raise InvalidRequestError("The prompt is empty; give it at least one token.", parameter=name)
    needed = -(-length // limits.block_size)
    if needed > limits.num_blocks:
        raise InvalidRequestError(
            f"The prompt has {length} tokens and needs {needed} KV blocks of {limits.block_size} tokens; the pool has "
            f"{limits.num_blocks}. Shorten it, or load the model with more kv_cache_memory.",
            parameter=name,
            value=length,
        )
    if length >= limits.max_model_len:
        raise InvalidRequestError(
            f"The prompt has {length} tokens; at most {limits.max_model_len - 1} leave room for an answer within "
            f"max_model_len = {limits.max_model_len}. Shorten it, or load the model with a larger max_model_len.",
            parameter=name,
            value=length,
        )


def _check_token_ids(request: EngineCoreRequest, params: SamplingParams, vocab_size: int) -> None:
    groups: dict[str, Iterable[int]] = {
        "prompt_token_ids": request.prompt_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": [token_id for word in request.bad_words_token_ids or () for token_id in word],
    }
    for name, token_ids in groups.items():
        for token_id in {min(token_ids, default=0), max(token_ids, default=0)}:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"Token id {token_id} in {name} is outside of the vocabulary; use ids from 0 to {vocab_size - 1}.",
                    parameter=name,
                    value=token_id,
                )
