"""Products of a few rows with a panel of weights, written in vectors: what LLVM would not find in a loop.

A panel is 64 outputs. For each pair of inputs it has their weights side by side, so one vector of weights meets one
number of the input, and there is nothing to add up across lanes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmkernel.engine.worker.compiled.arguments import PANEL

__all__ = ["bfloat16_panel"]

_LANES = 16
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)

State = list[ir.Value]


def bfloat16_panel(rows: int, outputs: int) -> Any:
    """panel(x, inner, weights, sums): sums float32 [rows, PANEL], of the first `outputs`, = x weights^T.

    x: address of float32 [rows, inner]. weights: bfloat16 [inner / 2, PANEL, 2].
    """
    vectors = outputs // _LANES

    @intrinsic
    def panel(typing: Any, x: Any, inner: Any, weights: Any, sums: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, inner, weights, sums = args

            def step(pair: ir.Value, state: State) -> State:
                """state: per row, the sums of even inputs, then of odd ones."""
                place = builder.add(weights, builder.mul(pair, _I64(4 * PANEL)))
                even, odd = _halves(builder, place, vectors)
                after = []
                for row in range(rows):
                    given = _row_place(builder, x, row, inner, builder.mul(pair, _I64(2)))
                    for part, numbers in enumerate((even, odd)):
                        factor = _splat(builder, _load(builder, given, _F32, 4 * part))
                        before = state[(2 * row + part) * vectors : (2 * row + part + 1) * vectors]
                        after += [_multiply_add(builder, factor, *pair) for pair in zip(numbers, before, strict=True)]
                return after

            state = _loop(builder, builder.ashr(inner, _I64(1)), _zeros(2 * rows * vectors), step)
            for row in range(rows):
                even, odd = (state[(2 * row + part) * vectors : (2 * row + part + 1) * vectors] for part in (0, 1))
                totals = [builder.fadd(*pair) for pair in zip(even, odd, strict=True)]
                for vector, total in enumerate(totals):
                    place = builder.add(sums, _I64(4 * (row * PANEL + vector * _LANES)))
                    builder.store(total, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return panel


def _halves(builder: ir.IRBuilder, address: ir.Value, vectors: int) -> tuple[State, State]:
    """Pairs of bfloat16 as float32: the first of each, the second of each."""
    words = [_load(builder, address, _INTS, 4 * _LANES * vector) for vector in range(vectors)]
    first = [builder.bitcast(builder.shl(word, _ints(16)), _FLOATS) for word in words]
    second = [builder.bitcast(builder.and_(word, _ints(0xFFFF0000)), _FLOATS) for word in words]
    return first, second


def _row_place(builder: ir.IRBuilder, address: ir.Value, row: int, size: ir.Value, index: ir.Value) -> ir.Value:
    """Of number `index` in a row of `size` numbers of float32."""
    return builder.add(address, builder.mul(builder.add(index, builder.mul(size, _I64(row))), _I64(4)))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int) -> ir.Value:
    place = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=4)


def _zeros(count: int) -> State:
    return [ir.Constant(_FLOATS, [0.0] * _LANES)] * count


def _ints(number: int) -> ir.Constant:
    return ir.Constant(_INTS, [number] * _LANES)


def _splat(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(one, one, _ints(0))


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{_LANES}f32", (), kind), [a, b, c])


def _loop(builder: ir.IRBuilder, count: ir.Value, state: State, step: Callable[[ir.Value, State], State]) -> State:
    """`count` steps (one at least) from state to state, which stays in registers."""
    before = builder.block
    body, behind = builder.append_basic_block("step"), builder.append_basic_block("behind")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(_I64)
    carried = [builder.phi(value.type) for value in state]
    after = step(index, carried)
    following = builder.add(index, _I64(1))
    index.add_incoming(_I64(0), before)
    index.add_incoming(following, builder.block)
    for phi, first, later in zip(carried, state, after, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, behind)
    builder.position_at_end(behind)
    return after
