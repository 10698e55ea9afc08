"""The bytes of every message are fixed: both ends of a wire may be of different versions."""

import importlib
import inspect
import pkgutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import llmkernel.protocol
from llmkernel.protocol.outputs import (
    COORDINATOR_INDEX,
    EEP_NOTIFICATION_CALL_ID,
    ENGINE_CORE_DEAD,
    EngineCoreEventType,
    EngineCoreOutputs,
    FinishReason,
)
from llmkernel.protocol.requests import EngineCoreRequest, EngineCoreRequestType, engine_identity
from llmkernel.protocol.sampling_params import BeamSearchParams
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder
from tests.protocol.golden_messages import MESSAGES

GOLDEN: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "golden.toml").read_text())
STAYS = {BeamSearchParams}  # beam search is made of requests with SamplingParams


def frames_of(message: Any) -> list[bytes]:
    return [bytes(frame) for frame in MsgpackEncoder().encode(message)]


def golden_frames(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in GOLDEN[name]]


@pytest.mark.row("A-046", "A-051", "A-061", "A-062", "A-078")
@pytest.mark.parametrize("name", MESSAGES)
def test_message_has_its_golden_bytes(name: str) -> None:
    message, _ = MESSAGES[name]
    found = [frame.hex() for frame in frames_of(message)]
    assert found == GOLDEN.get(name), f"in golden.toml, if the change is meant:\n{name} = {found}".replace("'", '"')


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    message, type_ = MESSAGES[name]
    decoded = MsgpackDecoder(type_).decode(golden_frames(name))
    assert type(decoded) is type(message)
    assert frames_of(decoded) == golden_frames(name)
    assert_equal(decoded, message)


def test_golden_file_holds_nothing_else() -> None:
    assert set(GOLDEN) == set(MESSAGES)


def test_every_struct_of_the_protocol_has_golden_bytes() -> None:
    seen: set[type] = set()
    for message, _ in MESSAGES.values():
        collect_types(message, seen)
    assert protocol_structs() - seen == STAYS


@pytest.mark.row("A-045", "A-126")
def test_type_frames_are_one_byte() -> None:
    expected = {"ADD": b"\0", "ABORT": b"\1", "START_DP_WAVE": b"\2", "UTILITY": b"\3"}
    inside = {"EXECUTOR_FAILED": b"\4", "WAKEUP": b"\5", "CLIENT_GONE": b"\6"}
    assert {kind.name: kind.value for kind in EngineCoreRequestType} == expected | inside
    assert EngineCoreRequestType(bytes(memoryview(b"\3"))) is EngineCoreRequestType.UTILITY
    with pytest.raises(ValueError, match="not a valid"):
        EngineCoreRequestType(b"\x09")


@pytest.mark.row("A-157")
def test_constants_of_the_wire() -> None:
    assert engine_identity(0) == b"\0\0"
    assert engine_identity(258) == b"\2\1"
    assert ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD"
    assert (EEP_NOTIFICATION_CALL_ID, COORDINATOR_INDEX) == (-1, -1)
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]
    assert [int(kind) for kind in EngineCoreEventType] == [1, 2, 3, 4, 5]


def test_outputs_are_stamped_when_they_are_made() -> None:
    earlier, later = EngineCoreOutputs(), EngineCoreOutputs()
    assert 0 < earlier.timestamp <= later.timestamp
    assert EngineCoreOutputs(timestamp=3.5).timestamp == 3.5


@pytest.mark.row("A-062")
def test_an_output_is_finished_when_it_has_a_reason() -> None:
    first, failed = MESSAGES["outputs"][0].outputs
    assert first.finished and failed.finished
    assert not MESSAGES["outputs_minimal"][0].outputs[0].finished
    assert first.prefill_stats.num_cached_tokens == 4


def test_prompt_embeddings_have_a_frame_of_their_own() -> None:
    message, type_ = MESSAGES["add"]
    assert len(golden_frames("add")) == 2
    decoded = MsgpackDecoder(type_).decode(golden_frames("add"))
    assert decoded.prompt_embeds.dtype == np.float32
    assert decoded.params is decoded.sampling_params
    assert MESSAGES["add_pooling"][0].params.dimensions == 8
    assert isinstance(message, EngineCoreRequest)


def protocol_structs() -> set[type]:
    found = set()
    for module in pkgutil.iter_modules(llmkernel.protocol.__path__, "llmkernel.protocol."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, msgspec.Struct) and member.__module__ == module.name:
                found.add(member)
    return found


def collect_types(value: Any, seen: set[type]) -> None:
    if isinstance(value, msgspec.Struct):
        seen.add(type(value))
        for field in value.__struct_fields__:
            collect_types(getattr(value, field), seen)
    elif isinstance(value, list):
        for item in value:
            collect_types(item, seen)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, msgspec.Struct):
        assert type(found) is type(expected)
        for field in expected.__struct_fields__:
            assert_equal(getattr(found, field), getattr(expected, field))
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected
