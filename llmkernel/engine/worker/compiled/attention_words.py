"""What attention does with keys and values, in vectors: scores of some keys, and sums of values by weight.

Heads come in vectors of 16 numbers; what is missing in the last one is zero. Queries and sums have `padded` numbers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmkernel.engine.worker.compiled.arguments import KEYS_AT_ONCE, LANES, SEGMENT, padded
from llmkernel.engine.worker.compiled.vectors import FLOATS, I64, Builder, State, loop
from llmkernel.engine.worker.compiled.words import Element

__all__ = ["score", "weigh"]


def score(element: Element, head_size: int) -> Any:
    """score(keys, queries, many, scores): the products of KEYS_AT_ONCE keys with `many` queries.

    queries: float32 [many, padded]. scores: of the first query, SEGMENT apart.
    """

    @intrinsic
    def score(typing: Any, keys: Any, queries: Any, many: Any, scores: Any) -> Any:
        def generate(context: Any, ir_builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            keys, queries, many, scores = args
            b = Builder(ir_builder)
            wide = [
                _head(b, b.place(keys, token, head_size * element.size), element, head_size)
                for token in range(KEYS_AT_ONCE)
            ]

            def step(index: ir.Value, state: State) -> State:
                query = b.place(queries, index, 4 * padded(head_size))
                sums = [b.constant(0.0)] * KEYS_AT_ONCE
                for vector in range(padded(head_size) // LANES):
                    given = b.floats(query, 4 * LANES * vector)
                    sums = [b.multiply_add(key[vector], given, one) for key, one in zip(wide, sums, strict=True)]
                b.store(b.add_up(sums), b.place(scores, index, 4 * SEGMENT))
                return state

            loop(ir_builder, many, [], step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return score


def weigh(element: Element, head_size: int, queries: int) -> Any:
    """weigh(values, tokens, weights, sums): sums float32 [queries, padded] += each of `tokens` values by its weight.

    weights: of the first query, SEGMENT apart.
    """

    @intrinsic
    def weigh(typing: Any, values: Any, tokens: Any, weights: Any, sums: Any) -> Any:
        def generate(context: Any, ir_builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            values, tokens, weights, sums = args
            b = Builder(ir_builder)
            vectors = padded(head_size) // LANES

            def step(token: ir.Value, state: State) -> State:
                value = _head(b, b.place(values, token, head_size * element.size), element, head_size)
                after = []
                for query in range(queries):
                    weight = b.splat(b.number(b.place(weights, token, 4), 4 * SEGMENT * query))
                    before = state[query * vectors : (query + 1) * vectors]
                    after += [b.multiply_add(weight, part, one) for part, one in zip(value, before, strict=True)]
                return after

            places = [4 * LANES * vector for vector in range(queries * vectors)]
            state = loop(ir_builder, tokens, [b.floats(sums, place) for place in places], step)
            for place, total in zip(places, state, strict=True):
                b.store(total, sums, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return weigh


def _head(b: Builder, address: ir.Value, element: Element, head_size: int) -> State:
    """The numbers of a head as float32 vectors, zeros behind the last."""
    whole, rest = divmod(head_size, LANES)
    found = [b.elements(address, vector * LANES, element.size) for vector in range(whole)]
    if rest:
        last = ir.Constant(FLOATS, [0.0] * LANES)
        for lane in range(rest):
            number = b.element(address, whole * LANES + lane, element.size)
            last = b.ir.insert_element(last, number, I64(lane))
        found.append(last)
    return found
