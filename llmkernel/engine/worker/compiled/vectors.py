"""Vectors of 16 numbers in LLVM's own language, for what LLVM would not find in a loop; and products of pairs.

A pair is two bfloat16 numbers side by side in 32 bits. Processors with avx512_bf16 multiply 16 pairs and add them to 16
sums of float32 in one instruction; elsewhere it is written as two multiplications in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from llmkernel.engine.worker.compiled.arguments import LANES
from llmkernel.engine.worker.compiled.machine import multiplies_pairs

__all__ = ["FLOATS", "I64", "Builder", "State", "loop"]

I64 = ir.IntType(64)
_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
FLOATS, INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)

State = list[ir.Value]


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


class Builder:
    """What is done with vectors, in front of llvmlite's builder. Addresses are int64, offsets in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.ir = builder
        self._pairs = multiplies_pairs()

    def place(self, address: ir.Value, index: ir.Value | int, size: int) -> ir.Value:
        """address + index * size."""
        index = I64(index) if isinstance(index, int) else index
        return self.ir.add(address, self.ir.mul(index, I64(size)))

    def ints(self, address: ir.Value, offset: int = 0) -> ir.Value:
        return self._load(address, offset, INTS)

    def halves(self, address: ir.Value, offset: int = 0) -> ir.Value:
        """Of float16, as float32."""
        return self.ir.fpext(self._load(address, offset, _HALVES), FLOATS)

    def floats(self, address: ir.Value, offset: int = 0) -> ir.Value:
        return self._load(address, offset, FLOATS)

    def elements(self, address: ir.Value, index: int, size: int) -> ir.Value:
        """16 numbers from `index` on, of 4 bytes (float32) or 2 (bfloat16), as float32."""
        if size == 4:
            return self.floats(address, 4 * index)
        words = self.ir.zext(self._load(address, 2 * index, ir.VectorType(_I16, LANES)), INTS)
        return self.ir.bitcast(self.ir.shl(words, _int(16)), FLOATS)

    def element(self, address: ir.Value, index: int, size: int) -> ir.Value:
        """One of them."""
        if size == 4:
            return self.number(address, 4 * index)
        word = self.ir.zext(self._load(address, 2 * index, _I16), _I32)
        return self.ir.bitcast(self.ir.shl(word, _I32(16)), _F32)

    def add_up(self, four: State) -> ir.Value:
        """The sum of the lanes of each of four vectors: <4 x float>."""
        while len(four) > 1:
            pairs = zip(four[::2], four[1::2], strict=True)
            four = [self._fold(a, b, 1 if len(four) == 2 else 0) for a, b in pairs]
        (sums,) = four
        for lanes in (8, 4):
            low, high = (self._pick(sums, sums, range(start, start + lanes)) for start in (0, lanes))
            sums = self.ir.fadd(low, high)
        return sums

    def _fold(self, a: ir.Value, b: ir.Value, level: int) -> ir.Value:
        """In each quarter of 4 lanes, a's and b's sums of two: a b a b (level 0), or of what that has left: a a b b."""
        first = ((0, LANES, 1, LANES + 1), (0, 1, LANES, LANES + 1))[level]
        parts = [[lane + two + quarter for quarter in range(0, LANES, 4) for lane in first] for two in (0, 2)]
        return self.ir.fadd(*(self._pick(a, b, part) for part in parts))

    def _pick(self, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
        return self.ir.shuffle_vector(a, b, mask)

    def number(self, address: ir.Value, offset: int = 0) -> ir.Value:
        return self._load(address, offset, _F32)

    def store(self, vector: ir.Value, address: ir.Value, offset: int = 0) -> None:
        place = self.ir.add(address, I64(offset))
        self.ir.store(vector, self.ir.inttoptr(place, vector.type.as_pointer()), align=4)

    def constant(self, number: float) -> ir.Constant:
        return ir.Constant(FLOATS, [number] * LANES)

    def splat(self, number: ir.Value) -> ir.Value:
        kind = ir.VectorType(number.type, LANES)
        one = self.ir.insert_element(ir.Constant(kind, ir.Undefined), number, _I32(0))
        return self.ir.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return self.ir.call(self.ir.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), kind), [a, b, c])

    def bits(self, words: ir.Value, shift: int, mask: int, more: int) -> ir.Value:
        """words >> shift & mask | more."""
        shifted = self.ir.lshr(words, _int(shift)) if shift else words
        return self.ir.or_(self.ir.and_(shifted, _int(mask)), _int(more))

    def pair_of_codes(self, words: ir.Value, shift: int) -> ir.Value:
        """Of codes of 8 bits at `shift` and 16 bits on, a pair of bfloat16: 8 bits are all that it has."""
        low, high = (self.ir.and_(self.ir.lshr(words, _int(shift + more)), _int(0xFF)) for more in (0, 16))
        low, high = (self.ir.bitcast(self.ir.sitofp(code, FLOATS), INTS) for code in (low, high))
        return self.ir.or_(self.ir.lshr(low, _int(16)), high)

    # Pairs.

    @property
    def input_bytes(self) -> int:
        """Of one number of the rows that `input_pair` reads."""
        return 2 if self._pairs else 4

    def input_pair(self, row: ir.Value, index: int) -> State:
        """Numbers `index` and the next of a row at this address, for pair_product: bfloat16, or float32 if widened."""
        if self._pairs:
            return [self.splat(self._load(row, 2 * index, _I32))]
        return [self.splat(self._load(row, 4 * (index + part), _F32)) for part in (0, 1)]

    def pair_product(self, given: State, weights: ir.Value, sums: ir.Value) -> ir.Value:
        """sums + the product of the pair with 16 pairs of weights."""
        if self._pairs:
            function = self.ir.module.globals.get(_DOT) or ir.Function(
                self.ir.module, ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS]), _DOT
            )
            pairs = (self.ir.bitcast(one, _PAIRS) for one in (weights, *given))
            return self.ir.call(function, [sums, *pairs])
        first, second = self.ir.shl(weights, _int(16)), self.ir.and_(weights, _int(0xFFFF0000))
        for number, word in zip(given, (first, second), strict=True):
            sums = self.multiply_add(number, self.ir.bitcast(word, FLOATS), sums)
        return sums

    def _load(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        place = self.ir.add(address, I64(offset))
        return self.ir.load(self.ir.inttoptr(place, kind.as_pointer()), align=2)


def loop(builder: ir.IRBuilder, count: ir.Value, state: State, step: Callable[[ir.Value, State], State]) -> State:
    """`count` steps (one at least) from state to state, which stays in registers."""
    before = builder.block
    body, behind = builder.append_basic_block("step"), builder.append_basic_block("behind")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    carried = [builder.phi(value.type) for value in state]
    after = step(index, carried)
    following = builder.add(index, I64(1))
    index.add_incoming(I64(0), before)
    index.add_incoming(following, builder.block)
    for phi, first, later in zip(carried, state, after, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, behind)
    builder.position_at_end(behind)
    return after


def _int(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)
