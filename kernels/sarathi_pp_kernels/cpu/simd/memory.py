"""Loads and stores of single values and whole lines."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import (
    F32,
    I8,
    I16,
    I32,
    I64,
    each_line,
    element_at,
    index,
    load_line,
    prefetch_at,
    store_rounded,
)


def _loader(element: Any, found: Any, convert: Any = None) -> Any:
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(element_at(builder, arguments[0], element, arguments[1]))
            return value if convert is None else convert(builder, value)

        return found(types.int64, types.int64), generate

    return intrinsic(load)


def _storer(element: Any, taken: Any, convert: Any = None) -> Any:
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[2] if convert is None else convert(builder, arguments[2])
            builder.store(value, element_at(builder, arguments[0], element, arguments[1]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, taken), generate

    return intrinsic(store)


def _nearest_bf16(builder: Any, value: Any) -> Any:
    """Return the bits of the nearest bfloat16, with instructions that any processor has.

    LLVM's own rounding would not do. For a processor without such an instruction, it calls a function that does not
    exist.
    """
    word = builder.bitcast(value, I32)
    sixteen, odd = ir.Constant(I32, 16), ir.Constant(I32, 1)
    upper = builder.lshr(word, sixteen)
    carry = builder.add(ir.Constant(I32, 0x7FFF), builder.and_(upper, odd))
    near = builder.lshr(builder.add(word, carry), sixteen)
    nan = builder.or_(upper, ir.Constant(I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, near), I16)


def _float8_value(builder: Any, code: Any) -> Any:
    """Return the float32 value of a code of float8_e4m3fn. No operand is subnormal: that is slow on some processors."""

    def number(value: int) -> Any:
        return ir.Constant(I32, value)

    wide = builder.zext(code, I32)
    size = builder.and_(wide, number(0x7F))
    # Exponents of codes are biased by 7, those of float32 by 127. Codes without an exponent count multiples of 2^-9.
    normal = builder.add(builder.shl(size, number(20)), number(120 << 23))
    small = builder.fmul(builder.uitofp(size, F32), ir.Constant(F32, 2.0**-9))
    bits = builder.select(builder.icmp_unsigned("<", size, number(8)), builder.bitcast(small, I32), normal)
    bits = builder.select(builder.icmp_unsigned("==", size, number(0x7F)), number(0x7FC00000), bits)
    return builder.bitcast(builder.or_(bits, builder.shl(builder.and_(wide, number(0x80)), number(24))), F32)


# Loads take (address, index) and return a value. Stores take (address, index, value). index counts elements.
load_word, store_word = _loader(I32, types.uint32), _storer(I32, types.uint32)
load_half = _loader(I16, types.uint16)
load_float, store_float = _loader(F32, types.float32), _storer(F32, types.float32)
load_index, store_index = _loader(I64, types.int64), _storer(I64, types.int64)
# bfloat16 in memory, float32 as a value. Stores round to nearest, and NaN stays NaN.
load_bf16 = _loader(
    I16,
    types.float32,
    lambda b, half: b.bitcast(b.shl(b.zext(half, I32), ir.Constant(I32, 16)), F32),
)
store_bf16 = _storer(I16, types.float32, _nearest_bf16)
load_fp16 = _loader(ir.HalfType(), types.float32, lambda b, half: b.fpext(half, F32))
# float8_e4m3fn in memory.
load_float8 = _loader(I8, types.float32, _float8_value)
store_fp16 = _storer(ir.HalfType(), types.float32, lambda b, value: b.fptrunc(value, ir.HalfType()))


@intrinsic
def prefetch(typing, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address, which is read soon, to the second-level cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_at(builder, element_at(builder, arguments[0], I8, index(0)), cache=2)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def round_lines(typing, source, to, num_lines):  # type: ignore[no-untyped-def]
    """Round 16 * num_lines float32 at `source` to bfloat16 at `to`. num_lines is at least 1. NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, to_, num_lines_ = arguments
        with each_line(builder, num_lines_) as (line, _):
            store_rounded(builder, to_, line, load_line(builder, source_, line))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
