"""The words that kernels are written in: numbers in memory at an address, and what numba has no vectorised form of.

A kernel works on addresses (int64), not on arrays: no checks, no reference counts, nothing allocated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "OPTIONS",
    "Element",
    "call",
    "call_with",
    "exp",
    "f32_at",
    "f64_at",
    "i64_at",
    "prefetch",
    "put_f32",
    "thread_number",
]

OPTIONS: dict[str, Any] = {
    "error_model": "numpy",  # x / 0 is infinity: a check would keep loops from being vectorised
    "fastmath": {"reassoc", "contract", "nsz"},  # sums may be reordered; NaN and infinity stay what they are
}
"""How kernels are compiled."""

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

Generate = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def _place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _load(kind: ir.Type, align: int) -> Generate:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load(_place(builder, args[0], args[1], kind), align=align)

    return generate


@intrinsic
def i64_at(typing: Any, address: Any, index: Any) -> Any:
    """The int64 at address + 8 * index."""
    return types.int64(types.int64, types.int64), _load(_I64, 8)


@intrinsic
def f64_at(typing: Any, address: Any, index: Any) -> Any:
    """The double at address + 8 * index."""
    return types.float64(types.int64, types.int64), _load(_F64, 8)


@intrinsic
def f32_at(typing: Any, address: Any, index: Any) -> Any:
    """The float32 at address + 4 * index."""
    return types.float32(types.int64, types.int64), _load(_F32, 4)


@intrinsic
def put_f32(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 at address + 4 * index."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.store(args[2], _place(builder, args[0], args[1], _F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def bf16_at(typing: Any, address: Any, index: Any) -> Any:
    """The bfloat16 at address + 2 * index, as float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        half = builder.load(_place(builder, args[0], args[1], _I16), align=2)
        return builder.bitcast(builder.shl(builder.zext(half, _I32), _I32(16)), _F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def put_bf16(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 at address + 2 * index, rounded to the nearest bfloat16, ties to even."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[2], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
        is_nan = builder.fcmp_unordered("uno", args[2], args[2])
        half = builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
        builder.store(half, _place(builder, args[0], args[1], _I16), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


class Element(NamedTuple):
    """How a number format lies in memory: at(address, index) -> float32, put(address, index, float32)."""

    at: Any
    put: Any
    size: int


BFLOAT16 = Element(bf16_at, put_bf16, 2)
FLOAT32 = Element(f32_at, put_f32, 4)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06
_LEAST, _MOST = -87.3, 88.0
_POLYNOMIAL = (1.9875691e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""exp(r) = 1 + r + r * r * p(r) for |r| <= ln 2 / 2: Cephes' expf (S. Moshier), 2 units in the last place."""


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e ** x in float32, in instructions that exist for vectors: 0 below -87.3, NaN of NaN."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        def call(name: str, *values: ir.Value) -> ir.Value:
            kind = ir.FunctionType(_F32, [_F32] * len(values))
            return builder.call(builder.module.declare_intrinsic(name, [_F32], kind), values)

        def constant(value: float) -> ir.Constant:
            return ir.Constant(_F32, value)

        (value,) = args
        bounded = call("llvm.maxnum", call("llvm.minnum", value, constant(_MOST)), constant(_LEAST))
        power = call("llvm.rint", builder.fmul(bounded, constant(_LOG2_E)))
        rest = call("llvm.fma", power, constant(-_LN2_HIGH), bounded)
        rest = call("llvm.fma", power, constant(-_LN2_LOW), rest)
        sum_ = constant(_POLYNOMIAL[0])
        for factor in _POLYNOMIAL[1:]:
            sum_ = call("llvm.fma", sum_, rest, constant(factor))
        sum_ = call("llvm.fma", builder.fmul(rest, rest), sum_, builder.fadd(rest, constant(1.0)))
        scale = builder.shl(builder.add(builder.fptosi(power, _I32), _I32(127)), _I32(23))
        result = builder.fmul(sum_, builder.bitcast(scale, _F32))
        result = builder.select(builder.fcmp_ordered("<", value, constant(_LEAST)), constant(0.0), result)
        return builder.select(builder.fcmp_unordered("uno", value, value), value, result)

    return types.float32(types.float32), generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at this address; nothing happens where there is none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [builder.inttoptr(args[0], byte), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def thread_number(typing: Any, function: Any) -> Any:
    """What the C function `int function()` at this address returns: OpenMP's number of the calling thread."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(args[0], kind), []), _I64)

    return types.int64(types.int64), generate


@intrinsic
def call(typing: Any, function: Any) -> Any:
    """Call the C function `void function()` at this address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), []).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call_with(typing: Any, function: Any, address: Any) -> Any:
    """Call the C function `void function(void *)` at this address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
