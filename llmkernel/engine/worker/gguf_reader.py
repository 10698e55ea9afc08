"""GGUFFile: the header of a GGUF file, checked, and its tensors as float32.

Own reader because gguf.GGUFReader takes 1.8 s for a 49,000-token vocabulary (this one 0.15 s), does not notice a
truncated file, and tells of a foreign one by a numpy error. Blocks are decoded by the gguf package, the reference.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import contextlib
import dataclasses
import math
import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llmkernel.config import format_bytes
from llmkernel.errors import EngineStartupError

__all__ = ["GGUFFile", "GGUFTensor"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape in torch's order, the type of its blocks, bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file (mapped, not read). Use in `with`.

    metadata: the key-value pairs, arrays as lists. tensors: name -> GGUFTensor, in the file's order.
    A file that is foreign, truncated or of an unknown type raises EngineStartupError with one line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the mapping back; idempotent."""
        with contextlib.suppress(BufferError):  # the traceback of an error holds a view: the mapping goes with it
            self._map.close()

    def raw(self, name: str) -> np.ndarray:
        """The tensor's blocks, uint8, as a view that must not outlive the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, shape in torch's order; a copy that outlives the file."""
        tensor = self.tensors[name]
        blocks = self.raw(name)
        block, width = GGML_QUANT_SIZES[tensor.type]
        try:
            values = dequantize(blocks.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * width), tensor.type)
        except NotImplementedError:
            raise self._refuse(
                f"tensor {name!r} is stored as {tensor.type.name}, which cannot be decoded; "
                "use a file with Q4, Q5, Q6, Q8 or F16 weights."
            ) from None
        # a plain float32 tensor is decoded as a view of the mapping
        return np.array(values.reshape(tensor.shape), np.float32, copy=tensor.type == GGMLQuantizationType.F32)

    @property
    def quantization(self) -> str:
        """The type that holds most of the weights, for example "Q4_1"."""
        weight: dict[str, int] = {}
        for tensor in self.tensors.values():
            weight[tensor.type.name] = weight.get(tensor.type.name, 0) + math.prod(tensor.shape)
        return max(weight, key=weight.__getitem__)

    def _open(self) -> None:
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
                if magic != b"GGUF":
                    raise self._refuse("it is not a GGUF file; give a .gguf file, or a folder with config.json.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise EngineStartupError(f"Cannot read {self.path}: {error.strerror}; check the path.") from error
        self._size = len(self._map)
        self._at = 4

    def _read_header(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(struct.pack("<I", version), "big")
            what = "it is big-endian" if swapped in (2, 3) else f"its GGUF version is {version}"
            raise self._refuse(f"{what}; only little-endian versions 2 and 3 can be read: convert it again.")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._refuse(f"its alignment is {alignment!r}; get the file again.")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            self.tensors[name] = self._place(name, shape, kind, start + offset)
        if len(self.tensors) != tensor_count or not self.tensors:
            raise self._refuse("it names no tensor, or one twice; get the file again.")
        end = max(tensor.offset + tensor.nbytes for tensor in self.tensors.values())
        if end > self._size:
            raise self._truncated(f"{format_bytes(self._size)} of {format_bytes(end)} are there")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._refuse(f"tensor {name!r} has {dimensions} dimensions; get the file again.")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise self._refuse(
                f"tensor {name!r} has the unknown type {kind}; upgrade the gguf package, or use another file."
            ) from None
        block, width = GGML_QUANT_SIZES[type_]
        if shape[-1] % block or 0 in shape:
            raise self._refuse(
                f"tensor {name!r} of shape {shape} does not fit {type_.name} blocks; get the file again."
            )
        return GGUFTensor(name, shape, type_, offset, math.prod(shape) // block * width)

    def _take(self, count: int) -> int:
        """Position of the next `count` bytes, which are then behind us."""
        at = self._at
        if at + count > self._size:
            raise self._truncated(f"the header goes on after its {format_bytes(self._size)}")
        self._at = at + count
        return at

    def _scalar(self, code: str) -> Any:
        form = f"<{code}"
        return struct.unpack_from(form, self._map, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        at = self._take(length)
        try:
            return self._map[at : at + length].decode()
        except UnicodeDecodeError:
            raise self._refuse("its header holds a text that is not UTF-8; get the file again.") from None

    def _strings(self, count: int) -> list[str]:
        """As so many calls of _string, which take a twentieth of a load: a vocabulary and its merges are 100,000."""
        data, size, length_at = self._map, self._size, struct.Struct("<Q").unpack_from
        at, texts = self._at, []
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0] if begin <= size else begin
            if at > size:
                self._take(at - self._at)  # says so
            texts.append(data[begin:at])
        self._at = at
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError:
            raise self._refuse("its header holds a text that is not UTF-8; get the file again.") from None

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._refuse(f"its header holds a value of the unknown type {kind}; get the file again.")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            at = self._take(struct.calcsize(f"<{_SCALARS[item]}") * count)
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self._map, at))
        if item != _STRING:
            raise self._refuse(f"its header holds an array of the unknown type {item}; get the file again.")
        return self._strings(count)

    def _truncated(self, what: str) -> EngineStartupError:
        return self._refuse(f"it is truncated ({what}); download or copy it again.")

    def _refuse(self, reason: str) -> EngineStartupError:
        return EngineStartupError(f"Cannot load {self.path}: {reason}")
