"""The kernel of decodes and short chunks: turns queries and keys, writes keys and values, attends over the paged pool.

Nothing is gathered: blocks are read where they lie. Query heads are dealt out so that threads read equally many keys
and need not wait for one another. Where two share a key head, both write what is new in it: the same bits.
"""

import math
from typing import Any

import numba
import numpy as np
from numba import types

from llmkernel.engine.worker.compiled.arguments import KEYS_AT_ONCE, SEGMENT, padded
from llmkernel.engine.worker.compiled.attention_words import score, weigh
from llmkernel.engine.worker.compiled.words import (
    OPTIONS,
    Element,
    exp,
    f32_at,
    f64_at,
    i64_at,
    prefetch,
    put_f32,
    thread_number,
)

__all__ = ["attention_kernel"]

AHEAD = 4
"""Blocks from the one that is read to the one that is asked for: memory answers later than a block takes."""


def attention_kernel(element: Element, head_size: int) -> Any:
    """AttentionArguments for heads of D = head_size, an even number; joined, pool and out are of `element`."""
    at, put, item = element
    D, P = head_size, padded(head_size)
    one, zero, infinity = np.float32(1), np.float32(0), np.float32(np.inf)
    i64, f32 = types.int64, types.float32

    @numba.njit(types.void(i64, i64, i64, i64, i64, f32, f32), **OPTIONS)
    def turn(source: Any, target: Any, angles: Any, rotary: Any, weight: Any, eps: Any, scale: Any) -> None:
        """Read a head, norm it where weight is not 0, turn it, scale it; target: float32 [P], zeros behind D."""
        length = one
        if weight != 0:
            squares = zero
            for i in range(D):
                squares += at(source, i) * at(source, i)
            length = one / np.float32(math.sqrt(squares / np.float32(D) + eps))
            for i in range(D):
                put_f32(target, i, at(source, i) * length * f32_at(weight, i))
        else:
            for i in range(D):
                put_f32(target, i, at(source, i))
        for i in range(rotary // 2):
            x, y = f32_at(target, 2 * i), f32_at(target, 2 * i + 1)
            c, s = f32_at(angles, 2 * i), f32_at(angles, 2 * i + 1)
            put_f32(target, 2 * i, (x * c - y * s) * scale)
            put_f32(target, 2 * i + 1, (x * s + y * c) * scale)
        for i in range(rotary, D):
            put_f32(target, i, f32_at(target, i) * scale)
        for i in range(D, P):
            put_f32(target, i, zero)

    score_keys = score(element, D)
    weigh_one, weigh_two, weigh_three, weigh_four = (weigh(element, D, queries) for queries in (1, 2, 3, 4))
    at_once = min(4, max(1, 256 // P))  # their sums are to stay in registers

    @numba.njit(types.void(i64, i64, i64, i64, i64), **OPTIONS)
    def weigh_values(values: Any, tokens: Any, weights: Any, many: Any, sums: Any) -> None:
        """Add `tokens` values, each with its weight, to the sums of `many` queries."""
        query = 0
        while query < many:
            given, into = weights + query * SEGMENT * 4, sums + query * P * 4
            taken = min(many - query, at_once)
            if taken == 1:
                weigh_one(values, tokens, given, into)
            elif taken == 2:
                weigh_two(values, tokens, given, into)
            elif taken == 3:
                weigh_three(values, tokens, given, into)
            else:
                weigh_four(values, tokens, given, into)
            query += taken

    @numba.njit(types.void(i64, i64, i64, i64, i64, i64, i64), **OPTIONS)
    def soften(scores: Any, first: Any, last: Any, whole: Any, sums: Any, state: Any, begun: Any) -> None:
        """Scores of the keys in [first, last) of a segment become weights, others 0; state: greatest score, total."""
        if last <= first:
            for i in range(whole):
                put_f32(scores, i, zero)
            return
        most = f32_at(state, 0)
        for i in range(first, last):
            most = max(most, f32_at(scores, i))
        total = zero
        for i in range(first):
            put_f32(scores, i, zero)
        for i in range(first, last):
            weight = exp(f32_at(scores, i) - most)
            total += weight
            put_f32(scores, i, weight)
        for i in range(last, whole):
            put_f32(scores, i, zero)
        if begun != 0:
            fade = exp(f32_at(state, 0) - most)
            total += f32_at(state, 1) * fade
            for i in range(P):
                put_f32(sums, i, f32_at(sums, i) * fade)
        put_f32(state, 0, most)
        put_f32(state, 1, total)

    @numba.njit(i64(i64, i64, i64, i64, i64, i64), **OPTIONS)
    def share(thread: Any, team: Any, requests: Any, counts: Any, ends: Any, heads: Any) -> Any:
        """The query head, counted through all requests, at which the share of a thread begins."""
        total = 0
        for request in range(requests):
            total += i64_at(counts, request) * i64_at(ends, request)
        before, wanted = 0, total * thread // team
        for request in range(requests):
            keys = i64_at(counts, request) * i64_at(ends, request)
            if before + keys > wanted:
                return request * heads + heads * (wanted - before) // keys
            before += keys
        return requests * heads

    @numba.njit(types.void(i64), **OPTIONS)
    def attention(a: Any) -> None:
        team, requests = i64_at(a, 0), i64_at(a, 2)
        starts, counts, ends, tables, table_size = i64_at(a, 3), i64_at(a, 4), i64_at(a, 5), i64_at(a, 6), i64_at(a, 7)
        joined, angles, rotary, norms = i64_at(a, 8), i64_at(a, 9), i64_at(a, 10), i64_at(a, 11)
        heads, kv_heads, pool, block_size = i64_at(a, 12), i64_at(a, 13), i64_at(a, 14), i64_at(a, 15)
        block_stride, window, out = i64_at(a, 16), i64_at(a, 17), i64_at(a, 18)
        me = thread_number(i64_at(a, 1)) if team > 1 else 0
        scratch = i64_at(a, 19) + me * i64_at(a, 20) * 4
        scale, eps = np.float32(f64_at(a, 21)), np.float32(f64_at(a, 22))
        group, lane, width = heads // kv_heads, block_size * D * item, (heads + 2 * kv_heads) * D * item
        unit = share(me, team, requests, counts, ends, heads)
        stop = share(me + 1, team, requests, counts, ends, heads)
        while unit < stop:
            request, query_head = unit // heads, unit % heads
            head = query_head // group
            taken = min(stop - unit, (head + 1) * group - query_head)
            unit += taken
            start, count, end = i64_at(starts, request), i64_at(counts, request), i64_at(ends, request)
            table = tables + request * table_size * 8
            many = count * taken
            wide = scratch
            queries = wide + P * 4
            sums = queries + many * P * 4
            states = sums + many * P * 4
            scores = states + many * 2 * 4
            for row in range(count):
                source, turned, position = (
                    joined + (start + row) * width,
                    angles + (start + row) * rotary * 4,
                    end - count + row,
                )
                place = pool + i64_at(table, position // block_size) * block_stride + position % block_size * D * item
                weight = norms + (heads + head) * D * 4 if norms != 0 else 0
                turn(source + (heads + head) * D * item, wide, turned, rotary, weight, eps, one)
                key, value = place + head * lane, place + (kv_heads + head) * lane
                given = source + (heads + kv_heads + head) * D * item
                for i in range(D):
                    put(key, i, f32_at(wide, i))
                for i in range(D):
                    put(value, i, at(given, i))
                for g in range(taken):
                    h, q = query_head + g, row * taken + g
                    weight = norms + h * D * 4 if norms != 0 else 0
                    turn(source + h * D * item, queries + q * P * 4, turned, rotary, weight, eps, scale)
            for i in range(many):
                put_f32(states, 2 * i, -infinity)
                put_f32(states, 2 * i + 1, zero)
            for i in range(many * P):
                put_f32(sums, i, zero)
            least = max(0, end - count + 1 - window) if window > 0 else 0
            begin = least // SEGMENT * SEGMENT
            final = (end - 1) // block_size
            for segment in range(begin, end, SEGMENT):
                low = max(segment, least // block_size * block_size)
                high = min(end, segment + SEGMENT)
                for index in range(low // block_size, (high + block_size - 1) // block_size):
                    block = pool + i64_at(table, index) * block_stride + head * lane
                    ahead = pool + i64_at(table, min(index + AHEAD, final)) * block_stride + head * lane
                    place = scores + (index * block_size - segment) * 4
                    for token in range(0, min(block_size, high - index * block_size), KEYS_AT_ONCE):
                        for line in range(0, KEYS_AT_ONCE * D * item, 64):
                            prefetch(ahead + token * D * item + line)
                        score_keys(block + token * D * item, queries, many, place + token * 4)
                whole = (high - segment + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
                for q in range(many):
                    position = end - count + q // taken
                    first = max(low, position + 1 - window) if window > 0 else low
                    last = min(high, position + 1)
                    first = min(max(first, segment), high)
                    last = max(last, first)
                    soften(
                        scores + q * SEGMENT * 4,
                        first - segment,
                        last - segment,
                        whole,
                        sums + q * P * 4,
                        states + q * 8,
                        segment - begin,
                    )
                for index in range(low // block_size, (high + block_size - 1) // block_size):
                    block = pool + i64_at(table, index) * block_stride + (kv_heads + head) * lane
                    ahead = pool + i64_at(table, min(index + AHEAD, final)) * block_stride + (kv_heads + head) * lane
                    for line in range(0, lane, 64):
                        prefetch(ahead + line)
                    place = scores + (index * block_size - segment) * 4
                    weigh_values(block, min(block_size, high - index * block_size), place, many, sums)
            for q in range(many):
                target = out + ((start + q // taken) * heads + query_head + q % taken) * D * item
                share_of = one / f32_at(states, 2 * q + 1)
                for i in range(D):
                    put(target, i, f32_at(sums + q * P * 4, i) * share_of)

    return attention
