"""Whatever arrives, the decoder answers with a message or with WireError."""

import pickle
import resource
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.errors import LLMKernelError
from llmkernel.protocol.handshake import EngineCoreReadyResponse, EngineHandshakeMetadata, EngineMessage
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder, WireError
from tests.protocol.golden_messages import MESSAGES

TYPES = [None, EngineCoreRequest, EngineCoreOutputs, EngineMessage, EngineHandshakeMetadata, EngineCoreReadyResponse]
DECODERS = [MsgpackDecoder(type_) for type_ in TYPES]
FRAMES = {name: [bytes(frame) for frame in MsgpackEncoder().encode(message)] for name, (message, _) in MESSAGES.items()}
pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext


class Holder(msgspec.Struct, array_like=True):
    array: np.ndarray


def decode_array(triple: Any, *frames: bytes) -> np.ndarray:
    return MsgpackDecoder(Holder).decode([pack([triple]), *frames]).array


def expect_answer(decoder: MsgpackDecoder, frames: Any) -> None:
    """The decoder returns, or raises WireError and nothing else."""
    try:
        decoder.decode(frames)
    except WireError:
        return


DATA = b"\0" * 16


@pytest.mark.parametrize(
    ("triple", "words"),
    [
        (["<f4", [4], 2], "frame 2 of 2"),
        (["<f4", [4], 0], "frame 0 of 2"),
        (["<f4", [4], -1], "frame -1 of 2"),
        (["<f4", [4], True], "frame True of 2"),
        (["<f4", [4], 1.0], "frame 1.0 of 2"),
        (["<f4", [4], None], "frame None of 2"),
        (["<f4", [4], 2**64 - 1], "frame 18446744073709551615 of 2"),
        (["<f4", [3], 1], "has 12 bytes, not 16"),
        (["<f4", [5], 1], "has 20 bytes, not 16"),
        (["<f4", [4], b"abc"], "has 16 bytes, not 3"),
        (["<f4", [-4], 1], "at least 0"),
        (["<f4", [-2, -2], 1], "at least 0"),
        (["<f4", [4.0], 1], "at least 0"),
        (["<f4", [True, 4], 1], "at least 0"),
        (["<f4", [2**62, 2**62], 1], "bytes, not 16"),
        (["<f4", [2**64 - 1], 1], "bytes, not 16"),
        (["<f4", [0, 2**62, 8], b""], "too big"),
        (["<f4", [0, 2**64 - 1], b""], "Malformed"),
        (["<f4", [1] * 33 + [4], 1], "at most 32 sizes"),
        (["<f4", 4, 1], "shape is a list"),
        (["<f4", None, 1], "shape is a list"),
        (["<f4", "4", 1], "shape is a list"),
        (["|O", [2], 1], "not a dtype"),
        (["O", [2], 1], "not a dtype"),
        (["|V8", [2], 1], "not a dtype"),
        (["i4,i4", [2], 1], "not a dtype"),
        (["(2,)i4", [2], 1], "not a dtype"),
        (["<f4\n", [4], 1], "not a dtype"),
        (["<x4", [4], 1], "not a dtype"),
        (["<f5", [4], 1], "not understood"),
        (["|S0", [4], 1], "has no size"),
        (["|S9999999999", [0], b""], "Malformed"),
        (["<U2147483647", [1], 1], "Malformed"),
        (["<M8[lightyear]", [2], 1], "Malformed"),
        (["float32", [4], 1], "not a dtype"),
        ([4, [4], 1], "not a dtype"),
        ([None, [4], 1], "not a dtype"),
        (["x" * 100_000, [4], 1], "not a dtype"),
        (["<f4", [4]], "triple"),
        (["<f4", [4], 1, 1], "triple"),
        ({"dtype": "<f4"}, "triple"),
        (7, "triple"),
        (b"\0" * 16, "triple"),
        (["<f4", [4], Ext(1, DATA)], r"extension 1 \(pickle\) is refused"),
        (["<f4", [4], Ext(2, DATA)], r"extension 2 \(cloudpickle\) is refused"),
        (["<f4", [4], Ext(99, DATA)], "extension 99 is unknown"),
        (["<f4", [4], Ext(3, b"abc")], "has 16 bytes, not 3"),
    ],
)
def test_malformed_arrays_are_refused(triple: Any, words: str) -> None:
    with pytest.raises(WireError, match=words) as caught:
        decode_array(triple, DATA)
    assert len(str(caught.value)) < 300


def test_the_intact_array_of_the_malformed_ones_is_taken() -> None:
    assert decode_array(["<f4", [4], 1], DATA).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("code", [1, 2])
def test_a_pickle_is_never_loaded(code: int, tmp_path: Any) -> None:
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Bomb(str(trap)))
    with pytest.raises(WireError, match="pickle"):
        MsgpackDecoder().decode([pack({"x": Ext(code, bomb)})])
    assert not trap.exists()


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01\x02", b"\xa5ab", b"\xa1\xff", b"\x81\x01", b"\xd6\xff\0"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_broken_msgpack_is_refused(decoder: MsgpackDecoder, payload: bytes) -> None:
    with pytest.raises(WireError, match="Malformed message"):
        decoder.decode([payload])


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x9c\x00"])
def test_deep_nesting_is_refused(decoder: MsgpackDecoder, opening: bytes) -> None:
    with pytest.raises(WireError, match="Malformed message"):
        decoder.decode([opening * 200_000])


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x03",
        b"\xdd\x00\x98\x96\x80" * 300 + bytes(10_000_000),
    ],
)
def test_counts_that_promise_more_than_there_is_allocate_nothing(payload: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decoder in DECODERS:
        with pytest.raises(WireError, match="Malformed message"):
            decoder.decode([payload])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 64 * 2**20


@pytest.mark.parametrize("frames", [[], None, 7, "text", ["text"], [None], [7], [b"\1", "text"], [[b"\1"]], object()])
def test_what_is_no_bytes_is_refused(frames: Any) -> None:
    with pytest.raises(WireError, match="Malformed message"):
        MsgpackDecoder().decode(frames)


def test_zmq_frames_and_every_kind_of_bytes_are_taken() -> None:
    for kind in (bytes, bytearray, memoryview, zmq.Frame, lambda data: np.frombuffer(data, np.int16)):
        assert MsgpackDecoder(list[int]).decode([kind(b"\x93\1\2\3")]) == [1, 2, 3]


def test_a_value_that_a_message_refuses_is_a_wire_error() -> None:
    frames = [pack(["r", [1], None, {"temperature": -1.0}, None, 1.5, None, None, None])]
    with pytest.raises(WireError, match="temperature"):
        MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert issubclass(WireError, ValueError)
    assert issubclass(WireError, LLMKernelError)


def test_a_decoder_works_on_after_an_error() -> None:
    decoder = MsgpackDecoder(EngineCoreOutputs)
    with pytest.raises(WireError):
        decoder.decode([b"\xc1"])
    assert decoder.decode(FRAMES["outputs"]).engine_index == 1


@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from(DECODERS))
@settings(max_examples=500, deadline=None)
def test_random_bytes_never_crash(frames: list[bytes], decoder: MsgpackDecoder) -> None:
    expect_answer(decoder, frames)


@given(st.data(), st.sampled_from(sorted(FRAMES)))
@settings(max_examples=1500, deadline=None)
def test_mutated_messages_never_crash(data: st.DataObject, name: str) -> None:
    frames = [bytearray(frame) for frame in FRAMES[name]]
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(frames, data)
    expect_answer(data.draw(st.sampled_from(DECODERS)), frames)
    expect_answer(MsgpackDecoder(MESSAGES[name][1]), frames)


def mutate(frames: list[bytearray], data: st.DataObject) -> None:
    """Change one frame, or the list of frames, as a broken or hostile peer would."""
    where = data.draw(st.integers(0, len(frames) - 1)) if frames else None
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "swap", "again"]))
    if where is None or kind == "again":
        frames.append(bytearray(data.draw(st.binary(max_size=40))))
    elif kind == "drop":
        del frames[where]
    elif kind == "swap":
        frames.insert(0, frames.pop(where))
    else:
        frame = frames[where]
        at = data.draw(st.integers(0, len(frame)))
        if kind == "cut":
            del frame[at:]
        elif kind == "insert":
            frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif at < len(frame):
            frame[at] = data.draw(st.integers(0, 255))
