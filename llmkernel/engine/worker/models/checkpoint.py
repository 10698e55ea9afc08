"""Where a decoder's tensors come from, by transformers' names: safetensors files, or a module that is loaded already.

Files are read with plain reads: nothing of them stays mapped but what `mapped` hands out, so a load costs no memory
beside the tensors that are kept. Format: https://github.com/huggingface/safetensors#format
"""

import abc
import dataclasses
import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from llmkernel.errors import EngineStartupError

__all__ = ["Checkpoint", "ModuleCheckpoint", "SafetensorsCheckpoint"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER = 100 * 2**20


class Checkpoint(abc.ABC):
    """Tensors by name. source: for messages. Reading a name that is not there raises KeyError."""

    source: str

    @abc.abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor, where possible as a view of the file, which takes memory only for what is looked at."""
        return self.read(name)


class ModuleCheckpoint(Checkpoint):
    """The parameters of a module of transformers. Nothing is copied."""

    def __init__(self, module: torch.nn.Module, source: str) -> None:
        self.source = source
        self._tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict().items():  # of tied tensors, the first name
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._tensors[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of these files. A file that is broken, or of another format, raises EngineStartupError, one line."""

    def __init__(self, files: Sequence[Path], source: str) -> None:
        self.source = source
        self._entries: dict[str, _Entry] = {}
        for path in files:
            self._read_header(path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            into = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            while into:
                count = file.readinto(into)
                if not count:
                    raise _broken(entry.path, "it ends too early")
                into = into[count:]
        return tensor

    def mapped(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if entry.offset % entry.dtype.itemsize:
            return self.read(name)
        start = entry.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with entry.path.open("rb") as file:
            memory = mmap.mmap(
                file.fileno(), entry.offset + entry.nbytes - start, access=mmap.ACCESS_COPY, offset=start
            )
        if hasattr(mmap, "MADV_WILLNEED"):
            memory.madvise(mmap.MADV_WILLNEED)  # read ahead, so that no step waits for the disk
        count = math.prod(entry.shape)
        return torch.frombuffer(memory, dtype=entry.dtype, count=count, offset=entry.offset - start).view(entry.shape)

    def _read_header(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, _MAX_HEADER):
                    raise _broken(path, "no header")
                header = json.loads(file.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    self._entries[name] = self._entry(path, size, 8 + length, tensor)
        except OSError as error:
            raise EngineStartupError(f"Cannot read {path}: {error.strerror}; check the model's folder.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _broken(path, str(error) or type(error).__name__) from error

    def _entry(self, path: Path, size: int, base: int, tensor: dict) -> _Entry:
        begin, end = tensor["data_offsets"]
        dtype = _DTYPES.get(tensor["dtype"], torch.uint8)
        entry = _Entry(path, dtype, tuple(tensor["shape"]), base + begin)
        if tensor["dtype"] in _DTYPES and entry.nbytes != end - begin:
            raise ValueError("a tensor's size does not fit its shape")
        if base + end > size:
            raise ValueError("it ends too early")
        return entry


def _broken(path: Path, reason: str) -> EngineStartupError:
    return EngineStartupError(
        f"Cannot load {path}: it is truncated or not a safetensors file ({reason}); download or copy it again."
    )
