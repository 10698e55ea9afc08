"""What the kernels are told: structs of 8 bytes a field, in the order in which the kernels read them."""

import ctypes
from typing import Any

__all__ = [
    "BLOCK_ROWS",
    "KEYS_AT_ONCE",
    "LANES",
    "OPENED_FORMS",
    "OPEN_ROWS",
    "PANEL",
    "SEGMENT",
    "UNIT_INPUTS",
    "Arguments",
    "AttentionArguments",
    "GateArguments",
    "NormArguments",
    "ProductArguments",
    "SequenceArguments",
    "padded",
]

LANES = 16
"""Numbers of a vector. Where registers are narrower, LLVM takes several."""

PANEL = 64
"""Outputs of a product whose weights lie together."""

UNIT_INPUTS = {"bfloat16": 8, "4-bit": 32, "4-bit-minima": 32, "8-bit": 32}
"""Inputs of a unit of weights, by form (panels.py)."""

BLOCK_ROWS = 4
"""Rows of a product that are multiplied together."""

SEGMENT = 256
"""Keys whose scores are held at once, a multiple of every block size that is served."""

KEYS_AT_ONCE = 4
"""Keys that are read together; block sizes must be a multiple of it, and blocks clean behind their last token."""

OPENED_FORMS = frozenset({"8-bit"})
"""Forms whose codes are worth being made bfloat16 once for many rows: a panel's at a time, in scratch."""

OPEN_ROWS = 16
"""Rows from which on they are."""


def padded(head_size: int) -> int:
    """Numbers of a head in whole vectors."""
    return -(-head_size // LANES) * LANES


class Arguments(ctypes.Structure):
    """What a kernel is told, one struct of 8 bytes each: the size of its team, where to ask for a thread's number, then
    its own."""

    team: int

    @staticmethod
    def of(*names: str, floats: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
        """_fields_ of a subclass: integers and addresses, then doubles."""
        head = [("team", ctypes.c_int64), ("thread_number", ctypes.c_int64)]
        own = [(name, ctypes.c_int64) for name in names]
        return [*head, *own, *((name, ctypes.c_double) for name in floats)]

    def __init__(self, **values: Any) -> None:
        super().__init__(team=1, **values)
        self.address = ctypes.addressof(self)


class NormArguments(Arguments):
    """hidden float32 [rows, size] += scale * added (0: nothing); out = hidden / sqrt(mean(hidden^2) + eps) * weight."""

    _fields_ = Arguments.of("rows", "size", "hidden", "added", "weight", "out", floats=("eps", "scale"))


class GateArguments(Arguments):
    """out [rows, size] = silu(gate) * up, of joined [rows, 2 * size]: gate, then up."""

    _fields_ = Arguments.of("rows", "size", "joined", "out")


class AttentionArguments(Arguments):
    """Requests' rows follow each other in `joined` [T, (heads + 2 * kv_heads) * D]: queries, keys, values of a token.

    angles: float32 [T, rotary], cosine and sine of each pair. pool: address of the layer in block 0; a block's lanes (a
    key head each, then a value head each) hold block_size tokens of D numbers, blocks are block_stride bytes apart.
    starts, counts, ends int64 [requests]: first row, rows, and tokens in the cache with this step's. tables: int64
    [requests, table_size]. window: tokens that a query sees, 0: all. norms: float32 [heads + kv_heads, D], or 0.
    out [T, heads * D]. scratch: float32 [team, scratch_size].
    """

    _fields_ = Arguments.of(
        "requests", "starts", "counts", "ends", "tables", "table_size",
        "joined", "angles", "rotary", "norms", "heads", "kv_heads",
        "pool", "block_size", "block_stride", "window", "out", "scratch", "scratch_size",
        floats=("scale", "eps"),
    )  # fmt: skip

    @staticmethod
    def scratch_for(queries: int, head_size: int) -> int:
        """Numbers of scratch that a thread needs for so many queries at once."""
        size = padded(head_size)
        return queries * (2 * size + SEGMENT + 2) + size


class ProductArguments(Arguments):
    """out [rows, outer] = x weights^T + bias (bfloat16 [outer], 0: none).

    x: bfloat16 [rows, units * the inputs of a unit]. float_out: 1 where out is float32, 0: bfloat16. weights: in panels
    (panels.py). scratch: float32 [team, scratch_size].
    """

    _fields_ = Arguments.of(
        "rows", "units", "outer", "x", "weights", "bias", "out", "float_out", "scratch", "scratch_size"
    )

    @staticmethod
    def scratch_for(rows: int, units: int, widened: int, opened: int) -> int:
        """Numbers of scratch that a thread needs. widened: inputs of a row that are kept in float32, too. opened: those
        of a panel whose codes are made numbers for many rows."""
        return BLOCK_ROWS * PANEL + rows * (units + widened) + (opened * PANEL // 2 if rows >= OPEN_ROWS else 0)


class SequenceArguments(Arguments):
    """calls: int64 [count, 2], of each a kernel's address and that of its arguments, whose team is this one's. meet:
    address of a function in which the threads of the team wait for each other."""

    _fields_ = Arguments.of("calls", "count", "meet")
