"""Messages to frames and back: msgpack for the structure, a frame of its own for the memory of each large array.

A numpy array travels as the triple (dtype, shape, data). `data` is the array's bytes, msgpack extension 3 (raw view),
when it is small, and otherwise the position of a frame that holds them: element 0 of a message is the msgpack, the
aux frames follow in the order in which their arrays were met. Nothing is pickled: extensions 1 and 2, which are pickles
in vLLM, are refused by name.

`bytes` and `bytearray` always stand inside the msgpack (one copy), because msgspec writes them itself. Send large ones
without a copy as `np.frombuffer(data, np.uint8)`.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import zmq

from llmkernel.errors import LLMKernelError

__all__ = ["DEFAULT_THRESHOLD", "Buffer", "MsgpackDecoder", "MsgpackEncoder", "WireError"]

Buffer: TypeAlias = bytes | bytearray | memoryview | zmq.Frame
"""One frame of a message."""

DEFAULT_THRESHOLD = 256
"""Bytes from which an array gets a frame of its own."""

RAW_VIEW = 3
_REFUSED_EXTENSIONS = {1: "pickle", 2: "cloudpickle"}
_MAX_DIMENSIONS = 32
_DTYPE = re.compile(r"[<>|](?:[biufcSU]\d{1,10}|[mM]8(?:\[\w{1,16}\])?)")
_ARRAY_KINDS = "biufcmMSU"
_NUMBER_KINDS = "biuf"


class WireError(LLMKernelError, ValueError):
    """Bytes that are not a message: truncated, of the wrong shape, or asking for what the wire does not carry."""


class MsgpackEncoder:
    """Objects to frames. Not thread safe: one per thread.

    threshold: bytes from which an array is sent as a frame of its own, without a copy. Such a frame *is* the array's
    memory: it must not change before the socket is done with it (see `pending`). Arrays that are not C-contiguous are
    copied first. An object that the wire does not carry raises TypeError with its type.
    """

    def __init__(self, threshold: int = DEFAULT_THRESHOLD) -> None:
        self._threshold = max(threshold, 1)
        self._frames: list[Any] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_unknown)

    def encode(self, obj: Any) -> list[Buffer]:
        """[msgpack, aux frame ...]"""
        frames = self._frames = [b""]
        try:
            frames[0] = self._encoder.encode(obj)
        finally:
            self._frames = []
        return frames

    def encode_into(self, obj: Any, buffer: bytearray) -> list[Buffer]:
        """As `encode`, but the msgpack is written into `buffer`, which becomes element 0 and is cut to its length.

        The socket may read a buffer long after the send returned: reuse it when its own tracker is done (`pending`).
        """
        frames = self._frames = [buffer]
        try:
            self._encoder.encode_into(obj, buffer)
        finally:
            self._frames = []
        return frames

    def _encode_unknown(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return self._encode_array(obj)
        if isinstance(obj, np.generic) and obj.dtype.kind in _NUMBER_KINDS:
            value = obj.item()
            return float(value) if isinstance(value, np.generic) else value  # a long double stays numpy's
        raise TypeError(
            f"{_type_name(obj)} does not travel between processes; "
            "send numbers, text, bytes, lists, dicts or numpy arrays."
        )

    def _encode_array(self, array: np.ndarray) -> tuple[str, tuple[int, ...], Any]:
        dtype = array.dtype
        if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize or type(array) not in (np.ndarray, np.memmap):
            raise TypeError(
                f"{_type_name(array)} of dtype {dtype} does not travel between processes; "
                "send a plain array of numbers, times or fixed-length strings."
            )
        if not array.shape or array.nbytes < self._threshold:
            return dtype.str, array.shape, msgspec.msgpack.Ext(RAW_VIEW, array.tobytes())
        self._frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return dtype.str, array.shape, len(self._frames) - 1


class MsgpackDecoder:
    """Frames to objects of `type` (None: whatever the msgpack says). Not thread safe: one per thread.

    Arrays need a field of type np.ndarray; where the type is Any they stay triples. Decoded arrays are read-only: small
    ones own their memory, large ones are views of their frame, which they keep alive. Whatever is wrong with the bytes
    raises WireError, after a walk over their structure that allocates nothing.
    """

    def __init__(self, type: Any = None) -> None:
        self._frames: list[memoryview] = []
        self._structure = msgspec.msgpack.Decoder(msgspec.Raw)
        self._decoder = msgspec.msgpack.Decoder(
            Any if type is None else type, ext_hook=_decode_extension, dec_hook=self._decode_custom
        )

    def decode(self, buffers: Sequence[Buffer] | Buffer) -> Any:
        """The object in `buffers` = [msgpack, aux frame ...]; a single buffer is a message without aux frames."""
        try:
            self._frames = _views(buffers)
            self._structure.decode(self._frames[0])  # counts that promise more than there is end here
            return self._decoder.decode(self._frames[0])
        except WireError:
            raise
        except Exception as error:  # a message's own checks may raise anything on hostile values
            raise WireError(f"Malformed message: {error}") from error
        finally:
            self._frames = []

    def _decode_custom(self, type_: Any, value: Any) -> Any:
        if type_ is not np.ndarray:
            raise TypeError(f"no value of type {type_!r} travels")
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError("an array is a triple (dtype, shape, data)")
        dtype, shape = _read_dtype(value[0]), _read_shape(value[1])
        data = value[2] if isinstance(value[2], bytes) else self._frame(value[2])
        size = math.prod(shape) * dtype.itemsize
        if size != len(data):
            raise ValueError(f"an array of dtype {dtype.str}, shape {shape} has {size} bytes, not {len(data)}")
        return np.ndarray(shape, dtype, data)

    def _frame(self, index: object) -> memoryview:
        if type(index) is not int or not 1 <= index < len(self._frames):
            raise ValueError(f"array data at frame {index!r} of {len(self._frames)}")
        return self._frames[index]


def _views(buffers: Any) -> list[memoryview]:
    single = isinstance(buffers, (bytes, bytearray, memoryview)) or hasattr(buffers, "buffer")
    views = [_view(buffer) for buffer in ([buffers] if single else buffers)]
    if not views:
        raise WireError("Malformed message: no frames.")
    return views


def _view(buffer: Any) -> memoryview:
    try:
        view = memoryview(getattr(buffer, "buffer", buffer))
        return (view if view.format == "B" and view.ndim == 1 else view.cast("B")).toreadonly()
    except TypeError as error:
        raise WireError(f"Malformed message: a frame is {_type_name(buffer)}, not bytes.") from error


def _decode_extension(code: int, data: memoryview) -> bytes:
    if code == RAW_VIEW:
        return bytes(data)
    name = _REFUSED_EXTENSIONS.get(code)
    raise WireError(
        f"Malformed message: msgpack extension {code} " + (f"({name}) is refused." if name else "is unknown.")
    )


def _read_dtype(text: object) -> np.dtype:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"{str(text)[:40]!r} is not a dtype that travels")
    dtype = np.dtype(text)
    if not dtype.itemsize:
        raise ValueError(f"dtype {text!r} has no size")
    return dtype


def _read_shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"an array's shape is a list of at most {_MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("a size in an array's shape is not an integer of at least 0")
    return tuple(shape)


def _type_name(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"
