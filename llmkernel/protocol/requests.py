"""What a client sends to the engine over the input socket.

Frames of a message, as the ROUTER sends it: engine identity, type (one byte), msgpack payload, aux buffers (the
memory of large arrays, in the order in which they were met). The engine's DEALER sees it without the identity.

    ADD            payload: EngineCoreRequest
    ABORT          payload: list of request ids
    START_DP_WAVE  payload: (wave, index of the engine to exclude or None)
    UTILITY        payload: (client_index, call_id, method, args)
"""

import enum
from typing import Any

import msgspec
import numpy as np

from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["EngineCoreRequest", "EngineCoreRequestType", "EngineIdentity", "LoRARequest", "engine_identity"]

EngineIdentity = bytes
"""Address of an engine on the input ROUTER: its index, 2 bytes little endian."""


def engine_identity(engine_index: int) -> EngineIdentity:
    return engine_index.to_bytes(2, "little")


class EngineCoreRequestType(bytes, enum.Enum):
    """Type frame of an input message. The last three never travel: they stand in the engine's own input queue."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"
    CLIENT_GONE = b"\x06"


class LoRARequest(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter to apply (vLLM's name). The parameter exists everywhere and is refused until it is built."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request, ready for the engine: tokens, not text. Positions are fixed; new fields are only appended.

    request_id: internal id, unique for the engine's life. external_req_id: the id that the user gave or got.
    prompt_token_ids: int ids, at least one. arrival_time: wall clock, seconds.
    sampling_params: with max_tokens and seed filled in, stop_token_ids merged with the model's own.
    client_index: whose output socket the answers go to. priority: lower runs earlier.
    eos_token_id: the end token that ends this request (None: ignore_eos). bad_words_token_ids: bad_words, tokenised.
    mm_features to kv_hints that are not named here hold vLLM's places and are refused or ignored.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: np.ndarray | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: dict[str, Any] | None = None
    eos_token_id: int | None = None
    bad_words_token_ids: list[list[int]] | None = None

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """Whichever params are set."""
        params = self.sampling_params or self.pooling_params
        assert params is not None
        return params
