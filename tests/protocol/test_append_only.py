"""A message of an older or newer peer decodes: fields are only ever appended (better.md M16)."""

from typing import Any

import msgspec
import numpy as np
import pytest

from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsLists
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder, WireError
from llmkernel.protocol.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from tests.protocol.golden_messages import MESSAGES

REQUEST_PLACES = [
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time",
    "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds", "prompt_is_token_ids", "client_index",
    "current_wave", "priority", "trace_headers", "resumable", "external_req_id", "reasoning_ended",
    "reasoning_parser_kwargs", "abort_immediately", "session_id", "kv_hints",
]  # fmt: skip
OUTPUT_PLACES = [
    "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "finish_reason",
    "stop_reason", "events", "kv_transfer_params", "ec_transfer_params", "trace_headers", "prefill_stats",
]  # fmt: skip
OUTPUTS_PLACES = [
    "engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output", "finished_requests", "wave_complete",
    "start_wave",
]  # fmt: skip
STATS_PLACES = [
    "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "step_counter", "current_wave",
    "kv_cache_usage", "prefix_cache_stats",
]  # fmt: skip


@pytest.mark.row("A-046", "A-061", "A-062", "A-148")
@pytest.mark.parametrize(
    ("struct", "places"),
    [
        (EngineCoreRequest, REQUEST_PLACES),
        (EngineCoreOutput, OUTPUT_PLACES),
        (EngineCoreOutputs, OUTPUTS_PLACES),
        (SchedulerStats, STATS_PLACES),
        (PrefixCacheStats, ["reset", "requests", "queries", "hits", "preempted_requests"]),
        (PrefillStats, ["num_prompt_tokens", "num_cached_tokens", "num_computed_tokens"]),
    ],
)
def test_fields_keep_their_places(struct: type[msgspec.Struct], places: list[str]) -> None:
    assert struct.__struct_config__.array_like
    assert list(struct.__struct_fields__[: len(places)]) == places


@pytest.mark.parametrize("name", ["add", "add_minimal", "outputs", "outputs_minimal"])
def test_a_shorter_struct_reads_a_longer_array(name: str) -> None:
    message, type_ = MESSAGES[name]
    frames = MsgpackEncoder().encode([*msgspec.structs.astuple(message), "a field of the future", {"another": 1}])
    assert MsgpackEncoder().encode(MsgpackDecoder(type_).decode(frames))[0] == MsgpackEncoder().encode(message)[0]


def test_an_array_of_the_future_is_skipped() -> None:
    fields = msgspec.structs.astuple(MESSAGES["outputs_minimal"][0])
    frames = MsgpackEncoder().encode([*fields, np.arange(1000)])
    assert len(frames) == 2
    assert MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs[0].request_id == "r"


@pytest.mark.parametrize(("name", "required"), [("add", 9), ("outputs", 0)])
def test_a_longer_struct_reads_a_shorter_array(name: str, required: int) -> None:
    message, type_ = MESSAGES[name]
    fields = msgspec.structs.astuple(message)
    for count in range(required, len(fields)):
        found = MsgpackDecoder(type_).decode(MsgpackEncoder().encode(fields[:count]))
        defaults = type_(*fields[:count])
        for field in type_.__struct_fields__[count:]:
            if field != "timestamp":  # filled in when it is missing
                assert getattr(found, field) == getattr(defaults, field)


def test_an_array_without_a_required_field_is_refused() -> None:
    fields = msgspec.structs.astuple(MESSAGES["add_minimal"][0])
    with pytest.raises(WireError, match="at least length 9"):
        MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(fields[:8]))


@pytest.mark.parametrize("name", ["hello", "init", "progress", "ready", "ready_response"])
def test_maps_may_carry_keys_of_the_future(name: str) -> None:
    message, type_ = MESSAGES[name]
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    frames = MsgpackEncoder().encode({**fields, "future": [1, 2]})
    assert MsgpackDecoder(type_).decode(frames) == message


def test_arrays_of_a_nested_struct_grow_too() -> None:
    lists = LogprobsLists(*(np.ones((1, 1), np.int32) for _ in range(3)))
    output = [*msgspec.structs.astuple(EngineCoreOutput("r", [1], lists)), "future"]
    found = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode([0, [output]]))
    assert found.outputs[0].new_logprobs is not None
    assert found.outputs[0].new_logprobs.logprobs.shape == (1, 1)
