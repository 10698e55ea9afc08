"""Encoder and decoder: what travels, where an array's memory goes, what is refused."""

import gc
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder, WireError
from llmkernel.protocol.transport import make_zmq_socket


class Holder(msgspec.Struct, array_like=True):
    array: np.ndarray
    more: list[np.ndarray] = []


def round_trip(array: np.ndarray, threshold: int = 256) -> np.ndarray:
    return MsgpackDecoder(Holder).decode(MsgpackEncoder(threshold).encode(Holder(array))).array


NUMBERS = (
    st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="="), hnp.integer_dtypes(endianness=">"),
        hnp.floating_dtypes(endianness="?"), hnp.complex_number_dtypes(endianness="="),
        hnp.byte_string_dtypes(endianness="="), hnp.unicode_string_dtypes(endianness="="),
        hnp.datetime64_dtypes(endianness="="), hnp.timedelta64_dtypes(endianness="="),
    )
)  # fmt: skip
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=8)


@settings(deadline=None)
@given(hnp.arrays(NUMBERS, SHAPES), st.sampled_from([0, 1, 16, 256]))
def test_arrays_come_back_as_they_went(array: np.ndarray, threshold: int) -> None:
    found = round_trip(array, threshold)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@settings(deadline=None)
@given(st.data())
def test_plain_values_come_back_untyped(data: st.DataObject) -> None:
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
    )
    value = data.draw(
        st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
    )
    assert MsgpackDecoder().decode(MsgpackEncoder().encode(value)) == value


def test_a_small_array_stands_in_the_message_as_a_raw_view() -> None:
    frames = MsgpackEncoder().encode(np.array([1, 2], dtype="<i4"))
    assert len(frames) == 1
    dtype, shape, data = msgspec.msgpack.decode(frames[0])
    assert (dtype, shape, data) == ("<i4", [2], msgspec.msgpack.Ext(3, b"\1\0\0\0\2\0\0\0"))


@pytest.mark.parametrize(("items", "frames"), [(63, 1), (64, 2)])
def test_the_threshold_counts_bytes(items: int, frames: int) -> None:
    assert len(MsgpackEncoder(256).encode(np.zeros(items, dtype=np.float32))) == frames


def test_a_scalar_array_never_gets_a_frame() -> None:
    assert len(MsgpackEncoder(1).encode(np.array("x" * 100))) == 1


def test_frames_follow_in_the_order_in_which_arrays_are_met() -> None:
    arrays = [np.full(100, number, dtype=np.int64) for number in range(4)]
    frames = MsgpackEncoder().encode(Holder(arrays[0], arrays[1:]))
    assert [memoryview(frame).cast("q")[0] for frame in frames[1:]] == [0, 1, 2, 3]
    found = MsgpackDecoder(Holder).decode(frames)
    assert [array[0] for array in [found.array, *found.more]] == [0, 1, 2, 3]


@pytest.mark.row("A-038")
def test_encoding_a_large_array_copies_nothing() -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    frame = MsgpackEncoder().encode(Holder(array))[1]
    assert np.shares_memory(np.frombuffer(frame, np.float32), array)


@pytest.mark.row("A-039")
def test_decoding_a_large_array_copies_nothing() -> None:
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(Holder(np.arange(1000)))]
    found = MsgpackDecoder(Holder).decode(frames).array
    assert np.shares_memory(found, np.frombuffer(frames[1], np.int64))
    assert not found.flags.writeable


@pytest.mark.row("A-039", "A-038")
def test_a_received_array_is_a_view_of_its_frame(ctx: zmq.Context, run: RunDirectory) -> None:
    sent = np.arange(100_000, dtype=np.float64)
    with (
        make_zmq_socket(ctx, run.address("out0"), zmq.PULL) as pull,
        make_zmq_socket(ctx, run.address("out0"), zmq.PUSH) as push,
    ):
        push.send_multipart(MsgpackEncoder().encode(Holder(sent)), copy=False)
        frames = pull.recv_multipart(copy=False)
        found = MsgpackDecoder(Holder).decode(frames).array
        assert np.shares_memory(found, np.frombuffer(frames[1].buffer))
        del frames
    gc.collect()
    np.testing.assert_array_equal(found, sent)  # the frame lives as long as its view


@pytest.mark.parametrize("view", [lambda a: a[:, ::2], lambda a: a.T, np.asfortranarray, lambda a: a[::-1]])
def test_arrays_that_are_not_contiguous_are_copied_first(view: Any) -> None:
    array = view(np.arange(600, dtype=np.int16).reshape(20, 30))
    np.testing.assert_array_equal(round_trip(array), array)


def test_a_decoded_array_outlives_its_message() -> None:
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(Holder(np.arange(1000)))]
    found = MsgpackDecoder(Holder).decode(frames).array
    del frames
    gc.collect()
    assert found.sum() == 499500


def test_codecs_keep_nothing_after_a_call() -> None:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(Holder)
    array = np.arange(1000)
    frames = encoder.encode(Holder(array))
    found = decoder.decode(frames).array
    gone = [weakref.ref(array), weakref.ref(found)]
    del array, frames, found
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.row("A-056")
def test_encode_into_reuses_the_buffer_and_cuts_it() -> None:
    encoder, buffer = MsgpackEncoder(), bytearray(b"x" * 10_000)
    frames = encoder.encode_into({"a": np.arange(100)}, buffer)
    assert frames[0] is buffer
    assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in encoder.encode({"a": np.arange(100)})]
    assert encoder.encode_into(1, buffer)[0] == b"\1"


@pytest.mark.parametrize(
    ("scalar", "number"),
    [
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(1e300), 1e300),
        (np.longdouble(0.25), 0.25),
    ],
)
def test_numpy_scalars_travel_as_numbers(scalar: Any, number: Any) -> None:
    found = MsgpackDecoder().decode(MsgpackEncoder().encode([scalar]))
    assert found == [number]
    assert type(found[0]) is type(number)


@pytest.mark.parametrize("data", [b"x" * 1000, bytearray(b"x" * 1000), memoryview(b"x" * 1000)])
def test_bytes_stand_in_the_message_whatever_their_size(data: Any) -> None:
    frames = MsgpackEncoder().encode(data)
    assert len(frames) == 1
    assert MsgpackDecoder(bytes).decode(frames) == bytes(data)


class Stranger:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Stranger(), "Stranger does not travel"),
        (print, "builtin_function_or_method does not travel"),
        (1j, "complex does not travel"),
        (np.complex64(1j), "complex64 does not travel"),
        (np.datetime64("2020-01-01"), "datetime64 does not travel"),
        (np.array([Stranger()], dtype=object), "dtype object does not travel"),
        (np.zeros(3, dtype="i4,f4"), "does not travel"),
        (np.zeros(3, dtype="V8"), "does not travel"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), "does not travel"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray"),
    ],
)
def test_what_does_not_travel_is_refused_by_its_type(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        MsgpackEncoder().encode({"x": [value]})


def test_a_refused_message_leaves_the_encoder_usable() -> None:
    encoder = MsgpackEncoder()
    with pytest.raises(TypeError):
        encoder.encode([np.arange(1000), Stranger()])
    assert len(encoder.encode(np.arange(1000))) == 2


def test_an_untyped_array_stays_a_triple() -> None:
    assert MsgpackDecoder().decode(MsgpackEncoder().encode([np.array([1], "<i2")])) == [["<i2", [1], b"\1\0"]]
    large = MsgpackEncoder().encode([np.zeros(100)])
    assert MsgpackDecoder().decode(large) == [["<f8", [100], 1]]


def test_one_buffer_is_a_message() -> None:
    assert MsgpackDecoder(list[int]).decode(b"\x92\1\2") == [1, 2]


@pytest.mark.row("A-044")
def test_a_typed_decoder_refuses_what_an_untyped_one_takes() -> None:
    assert MsgpackDecoder().decode([b"\x91\xa1x"]) == ["x"]
    with pytest.raises(WireError, match="Expected `int`"):
        MsgpackDecoder(list[int]).decode([b"\x91\xa1x"])
