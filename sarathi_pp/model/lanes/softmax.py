"""From scores to weights: the largest, powers and their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp.model.lanes.compile import inlined
from sarathi_pp.model.lanes.memory import load_float, store_float
from sarathi_pp.model.lanes.registers import (
    F32,
    FLOATS,
    I16,
    I32,
    LANES,
    call,
    each_line,
    fma,
    load_line,
    spread,
    store_rounded,
)

_FLOAT = np.float32
_LOWEST = _FLOAT(-80)
# A score that weighs nothing.
_HIDDEN = _FLOAT(-1e30)
# 2^x for |x| <= 1/2, from the lowest power on: a Chebyshev fit, within 4e-6 of its value.
_TWO_TO = (1.0, 0.6931210452034274, 0.24022349038021354, 0.05592197584225338, 0.009666368515338686)


@intrinsic
def largest(typing, address, num_lines):  # type: ignore[no-untyped-def]
    """Of 16 * num_lines float32, at least one line; NaN does not count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address_, num_lines_ = arguments
        with each_line(builder, num_lines_, ir.Constant(FLOATS, [float("-inf")] * LANES)) as (line, loop):
            loop.carry(call(builder, "llvm.maxnum.v16f32", FLOATS, [loop.carried, load_line(builder, address_, line)]))
        return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [loop.result])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def weigh_lines(typing, scores, to, num_lines, slope, top):  # type: ignore[no-untyped-def]
    """2^(slope * score - top) of 16 * num_lines float32 scores, at most 1, to bfloat16, and their sum in float32.

    Within 4e-6 of its value before it is rounded; NaN stays NaN. A score of -1e30 weighs 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_, to_, num_lines_, slope_, top_ = arguments
        slopes, below = spread(builder, slope_), spread(builder, builder.fneg(top_))
        with each_line(builder, num_lines_, ir.Constant(FLOATS, [0.0] * LANES)) as (line, loop):
            exponent = fma(builder, load_line(builder, scores_, line), slopes, below)
            whole = call(builder, "llvm.rint.v16f32", FLOATS, [exponent])
            rest = builder.fsub(exponent, whole)
            power = ir.Constant(FLOATS, [_TWO_TO[-1]] * LANES)
            for coefficient in reversed(_TWO_TO[:-1]):
                power = fma(builder, power, rest, ir.Constant(FLOATS, [coefficient] * LANES))
            every, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)
            weight = call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [power, whole, power, every, nearest])
            store_rounded(builder, to_, line, weight)
            loop.carry(builder.fadd(loop.carried, weight))
        return call(builder, "llvm.vector.reduce.fadd.v16f32", F32, [ir.Constant(F32, 0.0), loop.result])

    return types.float32(types.int64, types.int64, types.int64, types.float32, types.float32), generate


@inlined
def weigh(scores, weights, low, high, width, slope, softcap, before):  # type: ignore[no-untyped-def]
    """Scores [0, width) to bfloat16 weights 2^(slope * score - top), 0 outside [low, high); width a multiple of 16.

    before: the largest so far, or a sink, in units of slope * score, -inf for none; it is not in the sum. softcap: 0
    for none, else of the scores times slope. Returns top, the largest now, and the sum of the weights. The scores are
    used up.
    """
    if softcap > 0:
        for at in range(low, high):
            store_float(scores, at, _FLOAT(np.tanh(load_float(scores, at) * slope / softcap)) * softcap)
        slope = _FLOAT(1)
    for at in range(low):
        store_float(scores, at, _HIDDEN)
    for at in range(high, width):
        store_float(scores, at, _HIDDEN)
    top = max(before, largest(scores, width // 16) * slope)
    return top, weigh_lines(scores, weights, width // 16, slope, top)


@intrinsic
def _float_of_bits(typing, bits):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.int32), generate


@inlined
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) of float32 x <= 0, within 1e-7 of its value; 0 below -80, and NaN for NaN. The C library's has no lanes.

    2^n * exp(r) with n whole and |r| <= ln(2) / 2, the coefficients of Cephes' expf.
    """
    inside = x if x > _LOWEST else _LOWEST
    n = np.int32(inside * _FLOAT(1.4426950408889634) - _FLOAT(0.5))
    r = inside - _FLOAT(n) * _FLOAT(0.693359375) + _FLOAT(n) * _FLOAT(2.12194440e-4)
    p = _FLOAT(1.9875691500e-4)
    p = p * r + _FLOAT(1.3981999507e-3)
    p = p * r + _FLOAT(8.3334519073e-3)
    p = p * r + _FLOAT(4.1665795894e-2)
    p = p * r + _FLOAT(1.6666665459e-1)
    p = p * r + _FLOAT(5.0000001201e-1)
    p = p * r * r + r + _FLOAT(1)
    found = p * _float_of_bits(np.int32((n + np.int32(127)) << np.int32(23)))
    found = found if x > _LOWEST else _FLOAT(0)
    return found if x == x else x
