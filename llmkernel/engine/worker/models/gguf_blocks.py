"""GGUFBlocks: the blocks of a GGUF file as they are, by transformers' names of the weights."""

from pathlib import Path

import numpy as np
import torch

from llmkernel.engine.worker.gguf_architectures import describe
from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.engine.worker.linear.group_weight import GROUP, GroupWeight

__all__ = ["GGUFBlocks"]

_SCALE, _MINIMUM, _NIBBLES, _BYTES = ("d", "<f2"), ("m", "<f2"), ("q", "u1", (GROUP // 2,)), ("q", "u1", (GROUP,))
_FIELDS = {"Q4_0": [_SCALE, _NIBBLES], "Q4_1": [_SCALE, _MINIMUM, _NIBBLES], "Q8_0": [_SCALE, _BYTES]}


class GGUFBlocks:
    """An open GGUF file. Use in `with`."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        _, self._placements = describe(self._file)

    def __enter__(self) -> "GGUFBlocks":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def find(self, name: str) -> GroupWeight | None:
        """The weight, if it is stored in blocks of Q4_0 (w = d * (q - 8)), Q4_1 (d * q + m) or Q8_0 (d * q)."""
        placement = self._placements.get(name)
        if placement is None:
            return None
        kind = self._file.tensors[placement.source].type.name
        if kind not in _FIELDS:
            return None
        rows, columns = placement.shape
        blocks = self._file.raw(placement.source).view(np.dtype(_FIELDS[kind])).reshape(rows, columns // GROUP)
        if placement.decode is not None:  # it reorders rows, nothing else
            blocks = blocks[placement.decode(np.arange(rows))]
        stored = torch.from_numpy(np.ascontiguousarray(blocks["q"]))
        scales = torch.from_numpy(blocks["d"].astype(np.float32))
        if kind == "Q8_0":
            return GroupWeight(8, (stored ^ 128).flatten(1), scales)
        codes = torch.cat((stored & 15, stored >> 4), -1).flatten(1)
        minima = torch.from_numpy(blocks["m"].astype(np.float32)) if kind == "Q4_1" else None
        return GroupWeight(4, codes, scales, minima)
