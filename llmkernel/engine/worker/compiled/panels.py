"""Forms of weights in panels, and their product with a few rows, in vectors.

A panel is 64 outputs. Their weights for two inputs lie side by side, so that a vector of them meets one pair of inputs
and nothing is added up across lanes. A panel is a sequence of units, of so many inputs:

bfloat16, 8 inputs: [4 pairs, 64 outputs, 2], as oneDNN packs them on processors with AVX-512.
4-bit, 32 inputs: codes [4, 64 outputs, 8 inputs] in 32-bit words, then float16 scales [64], then, in the form with
minima, float16 minima [64]. w = scale * (code - 8), or scale * code + minimum.
8-bit, 32 inputs: codes [8, 64 outputs, 4 inputs] in words, then scales. w = scale * (code - 128).

Codes are multiplied as they are: the bits of 128 + code (0 to 15) are those of 0x4300 with the code in the last four,
so a shift and two masks make pairs of bfloat16, exactly. What is too much in the sum, a multiple of the sum of the
unit's inputs, is where the sum begins. An 8-bit code is two of 4 bits. In a word, the codes of a pair of inputs are 16
bits apart.
"""

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmkernel.engine.worker.compiled.arguments import LANES, PANEL, UNIT_INPUTS
from llmkernel.engine.worker.compiled.vectors import FLOATS, I64, Builder, State, loop

__all__ = ["FORMS", "PanelForm"]

_WORD = 4 * LANES
_ROW_OF_WORDS = 4 * PANEL
_NIBBLES, _AS_BFLOAT16 = 0x000F000F, 0x43004300
_HIDDEN = 128.0
"""What _AS_BFLOAT16 adds to a code."""


class _Unit(NamedTuple):
    """A unit of a panel meets some rows. inputs, totals: per row, where its inputs lie and what they add up to.

    place, codes: addresses of the unit, and of its codes if they are opened. first: vector of outputs.
    """

    inputs: State
    totals: State
    place: ir.Value
    codes: ir.Value | None
    first: ir.Value


class PanelForm(abc.ABC):
    """A form of weights. inputs, nbytes: of a unit. summed: it needs the sums of each unit's inputs. sums: that are
    kept for each output of a row."""

    inputs: int
    nbytes: int
    summed: bool
    sums = 1

    def product(self, rows: int, vectors: int, *, opened: bool = False) -> Any:
        """product(x, sums, units, panel, open, out, first): out float32 [rows, PANEL] at `vectors` vectors of outputs
        from vector `first` on, = x panel^T.

        x [rows, units * inputs], bfloat16 or, where processors do not multiply pairs, float32. sums: float32 [rows,
        units], of each unit's inputs. open: what `open` has made of the panel, read if `opened`. All are addresses.
        """

        @intrinsic
        def product(typing: Any, x: Any, sums: Any, units: Any, panel: Any, open: Any, out: Any, first: Any) -> Any:
            def generate(context: Any, ir_builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
                x, sums, units, panel, open, out, first = args
                b = Builder(ir_builder)
                row_size = ir_builder.mul(units, I64(self.inputs * b.input_bytes))
                given = [ir_builder.add(x, ir_builder.mul(row_size, I64(row))) for row in range(rows)]
                added = [b.place(sums, ir_builder.mul(units, I64(row)), 4) for row in range(rows)]

                def step(unit: ir.Value, state: State) -> State:
                    inputs = [b.place(row, unit, self.inputs * b.input_bytes) for row in given]
                    totals = [b.number(b.place(row, unit, 4)) for row in added] if self.summed else []
                    place = b.place(panel, unit, self.nbytes)
                    codes = b.place(open, unit, self.inputs * PANEL * 2) if opened else None
                    return self._unit(b, _Unit(inputs, totals, place, codes, first), state)

                zeros = [b.constant(0.0)] * self._state_size(rows, vectors)
                state = _fold(b, loop(ir_builder, units, zeros, step), rows * vectors)
                for index, total in enumerate(state):
                    row, vector = divmod(index, vectors)
                    b.store(total, b.place(out, first, _WORD), 4 * row * PANEL + vector * _WORD)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 7), generate

        return product

    def _state_size(self, rows: int, vectors: int) -> int:
        """Sums per row and vector, or several times as many that are added in the end."""
        return rows * vectors

    def open(self) -> Any:
        """open(panel, units, open): the codes of a panel as pairs of bfloat16, [units, inputs / 2, PANEL, 2]."""

        @intrinsic
        def open_panel(typing: Any, panel: Any, units: Any, open: Any) -> Any:
            def generate(context: Any, ir_builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
                panel, units, open = args
                b = Builder(ir_builder)

                def step(unit: ir.Value, state: State) -> State:
                    to = b.place(open, unit, self.inputs * PANEL * 2)
                    for index, pairs in enumerate(self._opened(b, b.place(panel, unit, self.nbytes))):
                        b.store(pairs, to, index * _WORD)
                    return state

                loop(ir_builder, units, [], step)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 3), generate

        return open_panel

    def _opened(self, b: Builder, place: ir.Value) -> Iterator[ir.Value]:
        """Vectors of pairs, in the order of `open`."""
        raise NotImplementedError

    @abc.abstractmethod
    def _unit(self, b: Builder, unit: _Unit, state: State) -> State:
        """state after the unit."""


class _BFloat16(PanelForm):
    inputs = UNIT_INPUTS["bfloat16"]
    nbytes, summed = inputs * 2 * PANEL, False
    _apart = 4

    def _state_size(self, rows: int, vectors: int) -> int:
        return rows * vectors * self._parts(rows)

    def _unit(self, b: Builder, unit: _Unit, state: State) -> State:
        parts = self._parts(len(unit.inputs))
        size = len(state) // parts
        sums = [state[part * size : (part + 1) * size] for part in range(parts)]
        _multiply_pairs(b, unit.inputs, self.inputs, b.place(unit.place, unit.first, _WORD), sums)
        return [total for part in sums for total in part]

    def _parts(self, rows: int) -> int:
        """Sums that are apart until the end, so that one does not wait for the other."""
        return max(1, self._apart // rows)


class _Groups(PanelForm):
    """Units with a scale per output."""

    inputs, summed = UNIT_INPUTS["4-bit"], True
    words: int
    """Rows of words in a unit."""
    middle: float
    """The code that stands for 0 where there are no minima."""

    def __init__(self, minima: bool) -> None:
        self._minima = minima
        self._zero = 0.0 if minima else self.middle
        self.nbytes = self.words * _ROW_OF_WORDS + 2 * PANEL * (2 if minima else 1)

    def _unit(self, b: Builder, unit: _Unit, state: State) -> State:
        inputs, totals, place, codes, first = unit
        vectors = len(state) // len(inputs)
        if codes is None:
            found = self._codes(b, inputs, totals, b.place(place, first, _WORD), vectors)
        else:
            found = _begin(b, totals, -self._zero, vectors)
            _multiply_pairs(b, inputs, self.inputs, b.place(codes, first, _WORD), [found])
        scales = b.ir.add(b.place(place, first, 2 * LANES), I64(self.words * _ROW_OF_WORDS))
        after = []
        for index, (before, code_sum) in enumerate(zip(state, found, strict=True)):
            row, vector = divmod(index, vectors)
            total = b.multiply_add(code_sum, b.halves(scales, vector * 2 * LANES), before)
            if self._minima:
                minimum = b.halves(scales, 2 * PANEL + vector * 2 * LANES)
                total = b.multiply_add(minimum, b.splat(totals[row]), total)
            after.append(total)
        return after

    @abc.abstractmethod
    def _codes(self, b: Builder, inputs: State, totals: State, place: ir.Value, vectors: int) -> State:
        """Per row and vector, the product with the codes at `place`."""


class _Groups4(_Groups):
    words, middle = 4, 8.0

    def _codes(self, b: Builder, inputs: State, totals: State, place: ir.Value, vectors: int) -> State:
        parts = 2 if len(inputs) == 1 else 1
        sums = [
            _begin(b, totals, -_HIDDEN - self._zero, vectors),
            *([b.constant(0.0)] * vectors for _ in range(parts - 1)),
        ]
        for row in range(self.words):
            words = _words(b, place, row, vectors)
            for pair in range(4):
                pairs = [b.bits(word, 4 * pair, _NIBBLES, _AS_BFLOAT16) for word in words]
                _multiply(b, inputs, 8 * row + 2 * pair, pairs, sums[pair % parts])
        return _fold(b, [total for part in sums for total in part], len(inputs) * vectors)


class _Groups8(_Groups):
    words, middle, sums = 8, 128.0, 2

    def _codes(self, b: Builder, inputs: State, totals: State, place: ir.Value, vectors: int) -> State:
        low, high = (_begin(b, totals, -_HIDDEN - zero, vectors) for zero in (self._zero, 0.0))
        for row in range(self.words):
            words = _words(b, place, row, vectors)
            for pair in range(2):
                for sums, shift in ((low, 0), (high, 4)):
                    pairs = [b.bits(word, 8 * pair + shift, _NIBBLES, _AS_BFLOAT16) for word in words]
                    _multiply(b, inputs, 4 * row + 2 * pair, pairs, sums)
        return [b.multiply_add(sums, b.constant(16.0), rest) for sums, rest in zip(high, low, strict=True)]

    def _opened(self, b: Builder, place: ir.Value) -> Iterator[ir.Value]:
        for row in range(self.words):
            words = _words(b, place, row, PANEL // LANES)
            for pair in range(2):
                for word in words:
                    yield b.pair_of_codes(word, 8 * pair)


def _begin(b: Builder, totals: State, factor: float, vectors: int) -> State:
    """factor * the sum of each row's inputs, for each vector."""
    return [b.splat(b.ir.fmul(total, ir.Constant(FLOATS.element, factor))) for total in totals for _ in range(vectors)]


def _words(b: Builder, place: ir.Value, row: int, vectors: int) -> State:
    """A row of words, the first so many vectors from `place` on."""
    return [b.ints(place, row * _ROW_OF_WORDS + vector * _WORD) for vector in range(vectors)]


def _fold(b: Builder, state: State, size: int) -> State:
    """Sums that were kept apart, added: `size` are left."""
    while len(state) > size:
        half = len(state) // 2
        state = [b.ir.fadd(*pair) for pair in zip(state[:half], state[half:], strict=True)]
    return state


def _multiply_pairs(b: Builder, inputs: State, count: int, place: ir.Value, sums: list[State]) -> None:
    """sums, in turns, += `count` inputs of each row times the pairs of bfloat16 at `place`, a row of words each."""
    for pair in range(count // 2):
        words = _words(b, place, pair, len(sums[0]) // len(inputs))
        _multiply(b, inputs, 2 * pair, words, sums[pair % len(sums)])


def _multiply(b: Builder, inputs: State, index: int, words: State, sums: State) -> None:
    """sums [rows * vectors] += inputs `index` and the next of each row times each vector of pairs."""
    for row, place in enumerate(inputs):
        given = b.input_pair(place, index)
        for vector, word in enumerate(words):
            at = row * len(words) + vector
            sums[at] = b.pair_product(given, word, sums[at])


FORMS: dict[str, PanelForm] = {
    "bfloat16": _BFloat16(),
    "4-bit": _Groups4(minima=False),
    "4-bit-minima": _Groups4(minima=True),
    "8-bit": _Groups8(minima=False),
}
