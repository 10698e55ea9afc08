"""The kernels of products of one to MOST_ROWS rows with bfloat16 weights, as oneDNN packs them.

For so few rows a product is the reading of its weights: these read them as fast as the memory gives them. Panels are
dealt out in halves, so that two threads have equally much where their number is odd.
"""

from typing import Any

import numba
from numba import types

from llmkernel.engine.worker.compiled.arguments import PANEL
from llmkernel.engine.worker.compiled.panels import bfloat16_panel
from llmkernel.engine.worker.compiled.words import BFLOAT16, OPTIONS, f32_at, i64_at, put_f32, thread_number

__all__ = ["product_kernel"]

_HALF = PANEL // 2
_at, _put, _item = BFLOAT16


@numba.njit(types.void(*[types.int64] * 6), **OPTIONS)
def _write(sums: Any, begin: Any, many: Any, bias: Any, out: Any, float_out: Any) -> None:
    """The sums of one row, as its outputs from `begin` on; float_out: 1 where they are float32."""
    if bias != 0:
        for i in range(many):
            place = begin % PANEL + i
            put_f32(sums, place, f32_at(sums, place) + _at(bias, begin + i))
    if float_out != 0:
        for i in range(many):
            put_f32(out, begin + i, f32_at(sums, begin % PANEL + i))
    else:
        for i in range(many):
            _put(out, begin + i, f32_at(sums, begin % PANEL + i))


def product_kernel(rows: int) -> Any:
    """ProductArguments, for exactly `rows` rows."""
    whole, part = bfloat16_panel(rows, PANEL), bfloat16_panel(rows, _HALF)

    @numba.njit(types.void(types.int64), **OPTIONS)
    def product(a: Any) -> None:
        team, inner, outer, x = i64_at(a, 0), i64_at(a, 2), i64_at(a, 3), i64_at(a, 4)
        weights, bias, out = i64_at(a, 5), i64_at(a, 6), i64_at(a, 7)
        float_out = i64_at(a, 10)
        me = thread_number(i64_at(a, 1)) if team > 1 else 0
        wide = i64_at(a, 8) + me * i64_at(a, 9) * 4
        sums = wide + rows * inner * 4
        for i in range(rows * inner):
            put_f32(wide, i, _at(x, i))
        half, last = outer // _HALF * me // team, outer // _HALF * (me + 1) // team
        while half < last:
            panel = weights + half // 2 * PANEL * inner * _item
            many = _HALF
            if half % 2 == 1:
                part(wide, inner, panel + _HALF * 2 * _item, sums + _HALF * 4)
            elif half + 1 == last:
                part(wide, inner, panel, sums)
            else:
                many = PANEL
                whole(wide, inner, panel, sums)
            for row in range(rows):
                place = out + row * outer * (4 if float_out != 0 else _item)
                _write(sums + row * PANEL * 4, half * _HALF, many, bias, place, float_out)
            half += many // _HALF

    return product
