"""The kernel of products with weights in panels.

For a few rows a product is the reading of its weights: this reads them once, as fast as the memory gives them, and goes
through the rows in blocks while a panel is near. Panels are dealt out in halves, so that two threads have equally much
where their number is odd.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from llmkernel.engine.worker.compiled.arguments import BLOCK_ROWS, LANES, OPEN_ROWS, OPENED_FORMS, PANEL
from llmkernel.engine.worker.compiled.machine import has_feature, multiplies_pairs
from llmkernel.engine.worker.compiled.panels import FORMS, PanelForm
from llmkernel.engine.worker.compiled.words import BFLOAT16, OPTIONS, f32_at, i64_at, put_f32, thread_number

__all__ = ["product_kernel"]

_HALF = PANEL // 2
_SUMS = 16 if has_feature("avx512f") else 4
"""Vectors of sums that stay in registers, beside what is multiplied."""

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


def _block(form: PanelForm, rows: int, *, opened: bool = False) -> Any:
    """The outputs `begin` to `end` of a panel, the whole or a half, of so many rows."""
    wide = min(PANEL // LANES, max(1, _SUMS // (rows * (1 if opened else form.sums))))
    narrow = min(wide, _HALF // LANES)
    whole, half = (form.product(rows, vectors, opened=opened) for vectors in (wide, narrow))

    @numba.njit(types.void(*[types.int64] * 8), **OPTIONS)
    def block(x: Any, sums: Any, units: Any, panel: Any, open: Any, out: Any, begin: Any, end: Any) -> None:
        if end - begin == PANEL:
            for vector in range(0, PANEL // LANES, wide):
                whole(x, sums, units, panel, open, out, vector)
        else:
            for vector in range(begin // LANES, end // LANES, narrow):
                half(x, sums, units, panel, open, out, vector)

    return block


def product_kernel(form_name: str) -> Any:
    """ProductArguments, for weights of one of panels.FORMS."""
    form = FORMS[form_name]
    inputs, nbytes, summed, widened = form.inputs, form.nbytes, form.summed, not multiplies_pairs()
    item = 4 if widened else _item
    opens = form_name in OPENED_FORMS
    one, two, four = (_block(form, rows) for rows in (1, 2, BLOCK_ROWS))
    open_panel, four_open = (form.open(), _block(form, BLOCK_ROWS, opened=True)) if opens else (None, None)

    @numba.njit(types.void(types.int64), **OPTIONS)
    def product(a: Any) -> None:
        team, rows, units, outer, x = i64_at(a, 0), i64_at(a, 2), i64_at(a, 3), i64_at(a, 4), i64_at(a, 5)
        weights, bias, out, float_out = i64_at(a, 6), i64_at(a, 7), i64_at(a, 8), i64_at(a, 9)
        me = thread_number(i64_at(a, 1)) if team > 1 else 0
        done = i64_at(a, 10) + me * i64_at(a, 11) * 4
        sums = done + BLOCK_ROWS * PANEL * 4
        given, out_item = x, 4 if float_out != 0 else _item
        if summed:
            for unit in range(rows * units):
                total = np.float32(0)
                for i in range(inputs):
                    total += _at(x, unit * inputs + i)
                put_f32(sums, unit, total)
        if widened:
            given = sums + rows * units * 4
            for i in range(rows * units * inputs):
                put_f32(given, i, _at(x, i))
        opened = sums + rows * (units + (units * inputs if widened else 0)) * 4
        halves = (outer + _HALF - 1) // _HALF
        half, last = halves * me // team, halves * (me + 1) // team
        while half < last:
            panel = weights + half // 2 * units * nbytes
            begin = half % 2 * _HALF
            many = PANEL if begin == 0 and half + 1 < last else _HALF
            if opens and rows >= OPEN_ROWS:
                open_panel(panel, units, opened)
            row = 0
            while row < rows:
                x, added, count = given + row * units * inputs * item, sums + row * units * 4, min(rows - row, 2)
                if rows - row >= BLOCK_ROWS:
                    count = BLOCK_ROWS
                    if opens and rows >= OPEN_ROWS:
                        four_open(x, added, units, panel, opened, done, begin, begin + many)
                    else:
                        four(x, added, units, panel, 0, done, begin, begin + many)
                elif count == 2:
                    two(x, added, units, panel, 0, done, begin, begin + many)
                else:
                    one(x, added, units, panel, 0, done, begin, begin + many)
                for i in range(count):
                    place = out + (row + i) * outer * out_item
                    _write(done + i * PANEL * 4, half * _HALF, min(many, outer - half * _HALF), bias, place, float_out)
                row += count
            half += many // _HALF

    return product
