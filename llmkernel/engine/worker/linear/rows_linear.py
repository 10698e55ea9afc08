"""RowsLinear: two forms of one weight, chosen by the number of rows of a step. It takes the memory of both."""

import time
from collections.abc import Sequence

import torch

from llmkernel.engine.worker.linear.linear import Linear

__all__ = ["RowsLinear", "settle"]

_ROWS = (1, 2, 4, 8, 12, 16, 32)
_SAMPLE_BYTES = 512 * 2**20
_ROUNDS = 2


class RowsLinear(Linear):
    """`few` for up to `limit` rows, `many` above. size: columns of the weight."""

    def __init__(self, few: Linear, many: Linear, size: int) -> None:
        self.kind = f"{few.kind} and {many.kind}"
        self.nbytes = few.nbytes + many.nbytes
        self.few = few
        self.many = many
        self.size = size
        self.limit = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] <= self.limit else self.many(x)


def settle(linears: Sequence[RowsLinear]) -> int:
    """Set the limit of all to the number of rows up to which `few` is faster, and return it. A tenth of a second.

    All weights run one after the other, as in a step: one alone would stay in the cache, and tell of the cache.
    """
    sample, total = [], 0
    for linear in linears:
        if total < _SAMPLE_BYTES:
            sample.append(linear)
            total += linear.nbytes
    limit = 0
    for rows in _ROWS:
        inputs = {size: torch.ones(rows, size, dtype=torch.bfloat16) for size in {linear.size for linear in sample}}
        few = many = float("inf")
        for _ in range(_ROUNDS):
            few = min(few, _seconds([linear.few for linear in sample], [inputs[linear.size] for linear in sample]))
            many = min(many, _seconds([linear.many for linear in sample], [inputs[linear.size] for linear in sample]))
        if few > many:
            break
        limit = rows
    for linear in linears:
        linear.limit = limit
    return limit


def _seconds(linears: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)
    return time.perf_counter() - started
