"""GGUFBlocks: the 4-bit blocks of a GGUF file as they are, by transformers' names of the weights."""

from pathlib import Path

import numpy as np
import torch

from llmkernel.engine.worker.gguf_architectures import describe
from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.engine.worker.linear.int4_linear import GROUP, Int4Weight

__all__ = ["GGUFBlocks"]

_HALF = GROUP // 2
_FIELDS = {"Q4_0": [("d", "<f2")], "Q4_1": [("d", "<f2"), ("m", "<f2")]}


class GGUFBlocks:
    """An open GGUF file. Use in `with`."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        _, self._placements = describe(self._file)

    def __enter__(self) -> "GGUFBlocks":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def find(self, name: str) -> Int4Weight | None:
        """The weight, if it is stored in Q4_0 or Q4_1 blocks: w = d * (q - 8), or d * q + m."""
        placement = self._placements[name]
        kind = self._file.tensors[placement.source].type.name
        if kind not in _FIELDS:
            return None
        fields = [*_FIELDS[kind], ("q", "u1", (_HALF,))]
        rows, columns = placement.shape
        blocks = self._file.raw(placement.source).view(np.dtype(fields)).reshape(rows, columns // GROUP)
        if placement.decode is not None:  # it reorders rows, nothing else
            blocks = blocks[placement.decode(np.arange(rows))]
        packed = torch.from_numpy(np.ascontiguousarray(blocks["q"]))
        codes = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
        scales = torch.from_numpy(blocks["d"].astype(np.float32))
        if kind == "Q4_0":
            return Int4Weight(codes, scales, torch.zeros_like(scales))
        return Int4Weight(codes, scales, torch.from_numpy(blocks["m"].astype(np.float32)) + 8 * scales)
