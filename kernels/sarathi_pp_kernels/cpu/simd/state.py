"""Steps of one row (token) in layers that keep a state: a convolution, and products with a block of the state.

A block of a state is sixteen columns: (num_rows, 16) float32, one line per row. No value of a column depends on another
column. Sums over the rows have four parts, of rows 0, 4, 8 .., rows 1, 5, 9 .. and so on, because an instruction that
adds to the sum before it would wait for it. The instructions are the same on every processor, and no sum is reordered.

Values in memory have `size` bytes, a literal: 2 for bfloat16 and 4 for float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.exp2 import constant, power_by_bits
from sarathi_pp_kernels.cpu.simd.gate import silu_of
from sarathi_pp_kernels.cpu.simd.registers import (
    F32,
    I16,
    I64,
    LANES,
    SHORTS,
    WORDS,
    each_line,
    element_at,
    floats_at,
    fma,
    index,
    load_line,
    load_values,
    spread,
    to_float,
)

# Parts of a sum over the rows of a block. The number of rows is a multiple of it.
_PARTS = 4


@intrinsic(prefer_literal=True)
def convolve_row(typing, size, taps, silu, sources, weights, step, bias, to, num_lines):  # type: ignore[no-untyped-def]
    """Compute to = bias + sum over j of weights[j] * source[j], for 16 * num_lines channels, and then its SiLU.

    Both results are rounded to the type of memory.

    Args:
        taps: number of products of a channel, a literal.
        silu: a literal: if 0, do not apply SiLU.
        sources: address of `taps` addresses, int64, of the inputs. The oldest is first.
        weights: (taps, step) float32.
        bias: float32.
    """
    num_bytes, num_taps, has_silu = size.literal_value, taps.literal_value, silu.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sources_, weights_, step_, bias_, to_, num_lines_ = arguments[3:]
        inputs = [builder.load(element_at(builder, sources_, I64, index(tap))) for tap in range(num_taps)]
        with each_line(builder, num_lines_) as (line, _):
            place = builder.mul(line, index(LANES))
            total = load_line(builder, bias_, line)
            for tap, source in enumerate(inputs):
                factor = builder.load(
                    floats_at(builder, weights_, builder.add(builder.mul(step_, index(tap)), place)), align=4
                )
                total = fma(builder, load_values(builder, num_bytes, source, place), factor, total)
            if has_silu:
                total = silu_of(builder, _rounded(builder, num_bytes, total), power_by_bits)
            _store(builder, num_bytes, total, to_, place)
        return context.get_dummy_value()

    return types.void(size, taps, silu, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def to_float_lines(typing, size, source, to, num_lines):  # type: ignore[no-untyped-def]
    """Convert 16 * num_lines values at `source` to float32 at `to`."""
    num_bytes = size.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source_, to_, num_lines_ = arguments
        with each_line(builder, num_lines_) as (line, _):
            place = builder.mul(line, index(LANES))
            values = load_values(builder, num_bytes, source_, place)
            builder.store(values, floats_at(builder, to_, place), align=4)
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 3), generate


@intrinsic
def multiply_lines(typing, row, factor, num_lines):  # type: ignore[no-untyped-def]
    """Multiply 16 * num_lines float32 by a factor, in place."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row_, factor_, num_lines_ = arguments
        factors = spread(builder, factor_)
        with each_line(builder, num_lines_) as (line, _):
            values = builder.fmul(load_line(builder, row_, line), factors)
            builder.store(values, floats_at(builder, row_, builder.mul(line, index(LANES))), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic(prefer_literal=True)
def delta_step(typing, size, block, key, query, num_rows, decay, beta, value, to):  # type: ignore[no-untyped-def]
    """Apply the gated delta rule to a block S for one token, and write its output.

        S = decay * S;   S += key x beta * (value - key S);   to = query S

    Args:
        block: address of the block, which is changed in place.
        key: (num_rows,) float32. query is like it.
        value: sixteen values. `to` is like it.
    """
    num_bytes = size.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, block_, key_, query_, num_rows_, decay_, beta_, value_, to_ = arguments
        groups = builder.sdiv(num_rows_, index(_PARTS))
        with each_line(builder, groups, *[constant(0.0)] * _PARTS) as (group, loop):
            rows = _rows(builder, group)
            loop.carry(
                *[
                    fma(builder, _factor(builder, key_, row), load_line(builder, block_, row), part)
                    for row, part in zip(rows, loop.carried, strict=True)
                ]
            )
        decays = spread(builder, decay_)
        stored = builder.fmul(decays, _sum(builder, loop.results))
        values = load_values(builder, num_bytes, value_, index(0))
        added = builder.fmul(builder.fsub(values, stored), spread(builder, beta_))
        _store(builder, num_bytes, _update(builder, block_, key_, query_, groups, decays, added), to_, index(0))
        return context.get_dummy_value()

    ends = types.float32, types.float32, types.int64, types.int64
    return types.void(size, *[types.int64] * 4, *ends), generate


@intrinsic(prefer_literal=True)
def scan_step(typing, size, block, key, query, num_rows, decay, step, skip, x, to):  # type: ignore[no-untyped-def]
    """Apply a step of a selective state space (Mamba-2) to a block S for one token, and write its output.

        S = decay * S + key x step * x;   to = query S + skip * x

    Args:
        block: address of the block, which is changed in place.
        key: (num_rows,) float32. query is like it.
        x: sixteen values.
        to: sixteen float32.
    """
    num_bytes = size.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, block_, key_, query_, num_rows_, decay_, step_, skip_, x_, to_ = arguments
        values = load_values(builder, num_bytes, x_, index(0))
        added = builder.fmul(values, spread(builder, step_))
        groups = builder.sdiv(num_rows_, index(_PARTS))
        out = _update(builder, block_, key_, query_, groups, spread(builder, decay_), added)
        out = builder.fadd(out, builder.fmul(values, spread(builder, skip_)))
        builder.store(out, floats_at(builder, to_, index(0)), align=4)
        return context.get_dummy_value()

    ends = types.float32, types.float32, types.float32, types.int64, types.int64
    return types.void(size, *[types.int64] * 4, *ends), generate


def _update(builder: Any, block: Any, key: Any, query: Any, groups: Any, decays: Any, added: Any) -> Any:
    """Build S = decays * S + key x added, and return the sixteen values query S."""
    with each_line(builder, groups, *[constant(0.0)] * _PARTS) as (group, loop):
        totals = []
        for row, part in zip(_rows(builder, group), loop.carried, strict=True):
            kept = builder.fmul(load_line(builder, block, row), decays)
            line = fma(builder, _factor(builder, key, row), added, kept)
            builder.store(line, floats_at(builder, block, builder.mul(row, index(LANES))), align=4)
            totals.append(fma(builder, _factor(builder, query, row), line, part))
        loop.carry(*totals)
    return _sum(builder, loop.results)


def _rows(builder: Any, group: Any) -> list[Any]:
    first = builder.mul(group, index(_PARTS))
    return [builder.add(first, index(part)) for part in range(_PARTS)]


def _factor(builder: Any, array: Any, row: Any) -> Any:
    return spread(builder, builder.load(element_at(builder, array, F32, row)))


def _sum(builder: Any, parts: list[Any]) -> Any:
    return builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))


def _store(builder: Any, size: int, values: Any, address: Any, place: Any) -> None:
    """Store sixteen float32 from element `place` on, rounded to bfloat16 if the size of a value is 2 bytes."""
    if size == 4:
        builder.store(values, floats_at(builder, address, place), align=4)
        return
    pointer = builder.bitcast(element_at(builder, address, I16, place), SHORTS.as_pointer())
    builder.store(_nearest_bf16(builder, values), pointer, align=2)


def _rounded(builder: Any, size: int, values: Any) -> Any:
    """Round sixteen float32 to what memory can hold."""
    return to_float(builder, _nearest_bf16(builder, values)) if size == 2 else values


def _nearest_bf16(builder: Any, values: Any) -> Any:
    """Return the bits of the nearest bfloat16 of each lane, with instructions that any processor has. NaN stays NaN."""
    words = builder.bitcast(values, WORDS)
    sixteen = ir.Constant(WORDS, [16] * LANES)
    upper = builder.lshr(words, sixteen)
    odd = builder.and_(upper, ir.Constant(WORDS, [1] * LANES))
    near = builder.lshr(builder.add(words, builder.add(ir.Constant(WORDS, [0x7FFF] * LANES), odd)), sixteen)
    nan = builder.or_(upper, ir.Constant(WORDS, [0x40] * LANES))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", values, values), nan, near), SHORTS)
