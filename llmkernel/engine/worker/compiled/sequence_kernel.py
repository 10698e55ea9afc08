"""The kernel that runs others, one after the other, on the threads that run it."""

from typing import Any

import numba
from numba import types

from llmkernel.engine.worker.compiled.words import OPTIONS, call, call_with, i64_at

__all__ = ["sequence_kernel"]


def sequence_kernel() -> Any:
    """SequenceArguments. All threads meet behind each kernel."""

    @numba.njit(types.void(types.int64), **OPTIONS)
    def sequence(a: Any) -> None:
        team, calls, count, meet = i64_at(a, 0), i64_at(a, 2), i64_at(a, 3), i64_at(a, 4)
        for index in range(count):
            call_with(i64_at(calls, 2 * index), i64_at(calls, 2 * index + 1))
            if team > 1:
                call(meet)

    return sequence
