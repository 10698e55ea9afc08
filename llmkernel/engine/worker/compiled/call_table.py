"""CallTable: calls of kernels with their arguments in one array, so that a step sets what is new in all at once."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmkernel.engine.worker.compiled.arguments import Arguments
from llmkernel.engine.worker.compiled.team import Kernel

__all__ = ["CallTable"]

Kind = type[Arguments]


class CallTable:
    """calls: (kernel, what it is told). The arguments are copied: those that were given are not looked at again."""

    def __init__(self, calls: Sequence[tuple[Kernel, Arguments]]) -> None:
        width = max(len(arguments._fields_) for _, arguments in calls)
        table = np.zeros((len(calls), width), dtype=np.int64)
        places: dict[tuple[Kind | None, str], list[int]] = defaultdict(list)
        for index, (_, arguments) in enumerate(calls):
            told = np.frombuffer(arguments, dtype=np.int64)  # type: ignore[call-overload]  # a ctypes struct
            table[index, : len(told)] = told
            for column, (name, *_rest) in enumerate(arguments._fields_):
                for kind in (None, type(arguments)):
                    places[kind, name].append(index * width + column)
        self._places = {key: np.array(found) for key, found in places.items()}
        self._table = table
        self._flat = table.reshape(-1)
        self._calls = np.array(
            [(kernel.address, row.ctypes.data) for (kernel, _), row in zip(calls, table, strict=True)], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def address(self) -> int:
        """Of int64 [calls, 2]: of each the addresses of its kernel and of its arguments."""
        return self._calls.ctypes.data

    def set(self, name: str, value: Any, kind: Kind | None = None) -> None:
        """Tell all calls that have this argument (of this kind); value: an integer, or one for each of them."""
        self._flat[self._places[kind, name]] = value
