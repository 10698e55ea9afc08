"""Kernels over the rows of a step: the sum of a residual and its norm, and the gate of an MLP."""

import math
from typing import Any

import numba
import numpy as np
from numba import types

from llmkernel.engine.worker.compiled.words import OPTIONS, Element, exp, f32_at, f64_at, i64_at, put_f32, thread_number

__all__ = ["gate_kernel", "norm_kernel"]


def norm_kernel(element: Element) -> Any:
    """NormArguments; added and out are of `element`."""
    at, put, item = element
    one = np.float32(1)

    @numba.njit(types.void(types.int64), **OPTIONS)
    def norm(a: Any) -> None:
        team, rows, size = i64_at(a, 0), i64_at(a, 2), i64_at(a, 3)
        hidden, added, weight, out = i64_at(a, 4), i64_at(a, 5), i64_at(a, 6), i64_at(a, 7)
        eps, scale = np.float32(f64_at(a, 8)), np.float32(f64_at(a, 9))
        first = thread_number(i64_at(a, 1)) if team > 1 else 0
        for row in range(first, rows, team):
            h, o = hidden + row * size * 4, out + row * size * item
            squares = np.float32(0)
            if added != 0:
                d = added + row * size * item
                for i in range(size):
                    value = f32_at(h, i) + scale * at(d, i)
                    put_f32(h, i, value)
                    squares += value * value
            else:
                for i in range(size):
                    value = f32_at(h, i)
                    squares += value * value
            length = one / np.float32(math.sqrt(squares / np.float32(size) + eps))
            for i in range(size):
                put(o, i, f32_at(h, i) * length * f32_at(weight, i))

    return norm


def gate_kernel(element: Element) -> Any:
    """GateArguments; everything is of `element`."""
    at, put, item = element
    one = np.float32(1)

    @numba.njit(types.void(types.int64), **OPTIONS)
    def gate(a: Any) -> None:
        team, rows, size, joined, out = i64_at(a, 0), i64_at(a, 2), i64_at(a, 3), i64_at(a, 4), i64_at(a, 5)
        first = thread_number(i64_at(a, 1)) if team > 1 else 0
        for row in range(first, rows, team):
            g, o = joined + row * 2 * size * item, out + row * size * item
            u = g + size * item
            for i in range(size):
                x = at(g, i)
                put(o, i, x / (one + exp(-x)) * at(u, i))

    return gate
