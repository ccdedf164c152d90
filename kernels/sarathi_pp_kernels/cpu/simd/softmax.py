"""The steps from attention scores to softmax weights: the largest score, powers and their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.compile import inlined
from sarathi_pp_kernels.cpu.simd.exp2 import ROUGH, constant, nearest_whole, power, power_below_one
from sarathi_pp_kernels.cpu.simd.memory import load_float, store_float
from sarathi_pp_kernels.cpu.simd.registers import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    WORDS,
    call,
    each_line,
    element_at,
    floats_at,
    fma,
    index,
    load_line,
    spread,
    store_rounded,
)

_FLOAT = np.float32
_LOWEST = _FLOAT(-80)
# A hidden score, whose weight is 0.
_HIDDEN = _FLOAT(-1e30)


@intrinsic
def _hide_line(typing, scores, line, low, high):  # type: ignore[no-untyped-def]
    """Hide the scores of one line that are outside [low, high), and store the line at once, from one register.

    The whole line is read again soon. If its values were stored one by one, that read would wait until all have reached
    the cache.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_, line_, low_, high_ = arguments
        first = builder.mul(line_, index(LANES))
        place = builder.add(spread(builder, first), ir.Constant(ir.VectorType(I64, LANES), list(range(LANES))))
        inside = builder.and_(
            builder.icmp_signed(">=", place, spread(builder, low_)),
            builder.icmp_signed("<", place, spread(builder, high_)),
        )
        seen = builder.select(inside, load_line(builder, scores_, line_), ir.Constant(FLOATS, [_HIDDEN] * LANES))
        pointer = builder.bitcast(element_at(builder, scores_, F32, first), FLOATS.as_pointer())
        builder.store(seen, pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@inlined
def hide(scores, low, high, width):  # type: ignore[no-untyped-def]
    """Hide the scores [0, width) outside [low, high), so that their weights are 0. width is a multiple of 16."""
    for line in range((low + 15) // 16):
        _hide_line(scores, line, low, high)
    for line in range(high // 16, width // 16):
        _hide_line(scores, line, low, high)


@intrinsic(prefer_literal=True)
def largest(typing, rows, scores, step, num_lines, found):  # type: ignore[no-untyped-def]
    """Write to found[r] the largest of 16 * num_lines float32 of row r. NaN does not count. num_lines is at least 1.

    A comparison that chooses a value is one instruction. LLVM's own maximum is slower: it looks for NaN on both sides,
    and goes from lane to lane when it reduces a register to one value.

    Args:
        rows: number of rows, a literal. Row r is r * step float32 after `scores`.
    """
    num_rows = rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, scores_, step_, num_lines_, found_ = arguments
        begins = _rows_at(builder, scores_, step_, F32, num_rows)
        for row, one in enumerate(_largest(builder, begins, num_lines_)):
            builder.store(one, element_at(builder, found_, F32, index(row)))
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 4), generate


@intrinsic
def largest_of(typing, scores, num_lines):  # type: ignore[no-untyped-def]
    """Return what `largest` writes for one row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_, num_lines_ = arguments
        return _largest(builder, [scores_], num_lines_)[0]

    return types.float32(types.int64, types.int64), generate


def _largest(builder: Any, begins: list[Any], num_lines: Any) -> list[Any]:
    """Build the search for the largest of 16 * num_lines float32 of each row, given by address."""

    def larger(one: Any, held: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, held), one, held)

    with each_line(builder, num_lines, *[constant(float("-inf"))] * len(begins)) as (line, loop):
        lines = [load_line(builder, begin, line) for begin in begins]
        loop.carry(*[larger(one, held) for one, held in zip(lines, loop.carried, strict=True)])
    return [_across(builder, of_row, larger) for of_row in loop.results]


def _across(builder: Any, held: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all lanes to one value: those 8, 4, 2 and 1 apart."""
    for distance in (8, 4, 2, 1):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        held = combine(builder.shuffle_vector(held, held, ir.Constant(WORDS, lanes)), held)
    return builder.extract_element(held, ir.Constant(I32, 0))


@intrinsic(prefer_literal=True)
def weigh_lines(typing, rows, scores, step, to, to_step, num_lines, slope, tops, sums):  # type: ignore[no-untyped-def]
    """Write the weights 2^(slope * score - tops[r]) as bfloat16, for 16 * num_lines float32 scores of row r.

    Write their sum, before rounding, to sums[r].

    The relative error is below 4e-6 before the weights are rounded. NaN stays NaN. A score of -1e30 has weight 0.

    Args:
        rows: number of rows, a literal. With several rows at once, an instruction need not wait for the one before.
        step: number of float32 values from a row of `scores` to the next.
        to_step: number of bfloat16 values from a row of `to` to the next.
        tops: float32, one per row.
        sums: float32, one per row.
    """
    num_rows = rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, scores_, step_, to_, to_step_, num_lines_, slope_, tops_, sums_ = arguments
        places = [index(row) for row in range(num_rows)]
        below = [
            spread(builder, builder.fneg(builder.load(element_at(builder, tops_, F32, place)))) for place in places
        ]
        begins = _rows_at(builder, scores_, step_, F32, num_rows)
        ends = _rows_at(builder, to_, to_step_, I16, num_rows)
        slopes = spread(builder, slope_)
        with each_line(builder, num_lines_, *[ir.Constant(FLOATS, [0.0] * LANES)] * num_rows) as (line, loop):
            exponents = [
                fma(builder, load_line(builder, begin, line), slopes, top)
                for begin, top in zip(begins, below, strict=True)
            ]
            weights = []
            for exponent in exponents:
                whole = nearest_whole(builder, exponent)
                weights.append(power(builder, whole, builder.fsub(exponent, whole), ROUGH))
            for end, weight in zip(ends, weights, strict=True):
                store_rounded(builder, end, line, weight)
            loop.carry(*[builder.fadd(held, weight) for held, weight in zip(loop.carried, weights, strict=True)])
        for place, of_row in zip(places, loop.results, strict=True):
            total = call(builder, "llvm.vector.reduce.fadd.v16f32", F32, [ir.Constant(F32, 0.0), of_row])
            builder.store(total, element_at(builder, sums_, F32, place))
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 5, types.float32, types.int64, types.int64), generate


@intrinsic
def weigh_row(typing, scores, num_lines, slope, top):  # type: ignore[no-untyped-def]
    """Replace 16 * num_lines float32 scores by the weights 2^(slope * score - top), and return the sum of these.

    The relative error is below 1e-7 for a weight near 1. NaN stays NaN. A score of -1e30 has weight 0.

    Args:
        top: the largest of the products slope * score, or more. It is rounded, and a weight is never above 1.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_, num_lines_, slope_, top_ = arguments
        slopes, below = spread(builder, slope_), spread(builder, builder.fneg(top_))
        with each_line(builder, num_lines_, constant(0.0)) as (line, loop):
            exponent = fma(builder, load_line(builder, scores_, line), slopes, below)
            exponent = builder.select(builder.fcmp_ordered(">", exponent, constant(0.0)), constant(0.0), exponent)
            whole = nearest_whole(builder, exponent)
            weight = power_below_one(builder, whole, builder.fsub(exponent, whole))
            builder.store(weight, floats_at(builder, scores_, builder.mul(line, index(LANES))), align=4)
            loop.carry(builder.fadd(loop.carried[0], weight))
        return _across(builder, loop.results[0], builder.fadd)

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


def _rows_at(builder: Any, address: Any, step: Any, element: Any, num_rows: int) -> list[Any]:
    """Return the addresses of rows that are `step` elements apart."""
    first = element_at(builder, address, element, index(0))
    return [builder.ptrtoint(builder.gep(first, [builder.mul(step, index(row))]), I64) for row in range(num_rows)]


@inlined
def cap(scores, low, high, slope, softcap):  # type: ignore[no-untyped-def]
    """Replace the scores [low, high) by softcap * tanh(slope * score / softcap)."""
    for at in range(low, high):
        store_float(scores, at, _FLOAT(np.tanh(load_float(scores, at) * slope / softcap)) * softcap)


@intrinsic
def _float_of_bits(typing, bits):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.int32), generate


@inlined
def exponential(x):  # type: ignore[no-untyped-def]
    """Return exp(x) of float32 x <= 0 with a relative error below 1e-7. It is 0 below -80, and NaN for NaN.

    The C library's exp does not use SIMD. This is 2^n * exp(r) with n whole and |r| <= ln(2) / 2. The coefficients are
    those of Cephes' expf.
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
