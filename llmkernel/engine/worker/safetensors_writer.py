"""write_safetensors: a checkpoint written tensor by tensor, so that a conversion never holds a model in memory.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON, the tensors in a row).
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

__all__ = ["write_safetensors"]

_ALIGNMENT = 64  # of the first tensor in the file: a mapped tensor then suits the widest vector loads


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> Iterator[str]:
    """Write float32 tensors of `shapes`, asking `read` for one at a time; yields each name once it is written.

    The file is on the disk (fsync) when the iterator ends. A failing write raises OSError as it is.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, shape in shapes.items():
            values = np.ascontiguousarray(read(name), dtype="<f4")
            if values.shape != shape:
                raise ValueError(f"{name} has the shape {values.shape}, not {shape}")
            file.write(values.data.cast("B"))
            yield name
        file.flush()
        os.fsync(file.fileno())
