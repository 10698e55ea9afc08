"""EngineCoreRequests and EngineCoreOutputs made by hand, for tests without an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmkernel.engine.fake_tokenizer import fake_tokenizer_facts
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import EngineCoreReadyResponse, ModelFacts
from llmkernel.protocol.outputs import EngineCoreOutput, FinishReason, LogprobsLists
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

EOS = 258


def fake_tokenizer() -> Tokenizer:
    """The FakeExecutor's: id = byte."""
    return Tokenizer.from_facts(fake_tokenizer_facts())


def ready_response(**changes: Any) -> EngineCoreReadyResponse:
    """What an engine with the fake model says; model_* changes go to ModelFacts."""
    model = {name[6:]: changes.pop(name) for name in list(changes) if name.startswith("model_")}
    facts: dict[str, Any] = {
        "version": "0",
        "max_model_len": 100,
        "num_gpu_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_size_tokens": 1008,
        "tokenizer": fake_tokenizer_facts(),
    }
    described: dict[str, Any] = {
        "name": "fake",
        "source": "fake",
        "architecture": "Fake",
        "implementation": "fake",
        "dtype": "none",
        "device": "none",
        "vocab_size": 512,
        "max_position": 100,
    }
    return EngineCoreReadyResponse(**{**facts, **changes, "model": ModelFacts(**{**described, **model})})


def request(request_id: str, params: SamplingParams, prompt: Sequence[int] = (65,), **fields: Any) -> EngineCoreRequest:
    """As InputProcessor makes it; the external id is the part before the last "-"."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id.rsplit("-", 1)[0],
        **fields,
    )


def output(
    request_id: str, tokens: str | Sequence[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    """What a step brought for a request; a str stands for its bytes."""
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    return EngineCoreOutput(request_id, ids, finish_reason=finish, **fields)


def logprobs(ids: Sequence[int], count: int) -> LogprobsLists:
    """For each id: itself at -1, then the `count` ids after it at -2, -3 ..."""
    rows = np.array([[token_id, *range(token_id + 1, token_id + 1 + count)] for token_id in ids], dtype=np.int32)
    values = np.array([[-1.0 - at for at in range(count + 1)] for _ in ids], dtype=np.float32)
    return LogprobsLists(rows, values, np.array([1] * len(ids), dtype=np.int32))
