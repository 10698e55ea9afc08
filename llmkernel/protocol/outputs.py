"""What the engine pushes to a client over the output socket: EngineCoreOutputs, or the frame ENGINE_CORE_DEAD.

Frames: msgpack EngineCoreOutputs, then aux buffers (the memory of large arrays). Or the one frame ENGINE_CORE_DEAD.
"""

import enum
import time
from typing import Any

import msgspec
import numpy as np

from llmkernel.protocol.stats import PrefillStats, SchedulerStats

__all__ = [
    "COORDINATOR_INDEX",
    "EEP_NOTIFICATION_CALL_ID",
    "ENGINE_CORE_DEAD",
    "ENGINE_FAULT_CALL_ID",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FinishReason",
    "LogprobsLists",
    "UtilityFailure",
    "UtilityOutput",
    "UtilityResult",
]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The only frame of the last message of an engine that dies of an exception."""

EEP_NOTIFICATION_CALL_ID = -1
"""Reserved utility call id: a one-sided notification, never in the registry of pending calls."""

ENGINE_FAULT_CALL_ID = -2
"""Reserved utility call id: the failure that ends the engine, sent just before ENGINE_CORE_DEAD."""

COORDINATOR_INDEX = -1
"""client_index that means the data-parallel coordinator, not a client."""


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` is what users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(enum.IntEnum):
    """What may happen to a request in the engine, besides tokens. Those from RECEIVED on are ours.

    RECEIVED: its ADD was decoded. PREFILLED: a step has read a part of its text, not the last one.
    """

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    RECEIVED = 4
    PREFILLED = 5


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """Something that happened to a request in the engine. timestamp: the engine's time.monotonic(), seconds.

    tokens: SCHEDULED: taken from the prefix cache; PREFILLED: read so far; else 0.
    """

    type: EngineCoreEventType
    timestamp: float
    tokens: int = 0


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of some positions, as arrays (they cross the wire without a copy when they are large).

    logprob_token_ids: int32 [positions, k + 1], the chosen token first, then the k best.
    logprobs: float32 [positions, k + 1], natural logarithm, of the raw logits.
    sampled_token_ranks: int32 [positions], 1 = the most likely.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What the steps of a message brought for one request.

    new_token_ids: tokens generated in them (may be empty when only the end is news).
    finish_reason: set once, in the last output. stop_reason: the stop token's id, or the reason of an error.
    events: since the last output. prefill_stats: once, with the first token.
    Fields up to prompt_token_id_logprobs keep vLLM's places.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    pooling_output: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityResult(msgspec.Struct, array_like=True, gc=False):
    """Envelope of a utility call's result: plain msgpack types only."""

    result: Any = None


class UtilityFailure(msgspec.Struct, array_like=True, gc=False):
    """A utility call that raised in the engine: exception class name, message, formatted traceback."""

    type: str
    message: str
    traceback: str


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call: the result, or the failure."""

    call_id: int
    failure: UtilityFailure | None = None
    result: UtilityResult | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step, or several that followed each other quickly, or a utility call brought for one client.

    timestamp: the engine's time.monotonic() when it was made, at the end of the newest step that it tells of, seconds;
    filled in by itself.
    finished_requests: ids that ended in this step, for clients that balance several engines.
    pushed: the same clock when it was encoded for the socket.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    pushed: float | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()
