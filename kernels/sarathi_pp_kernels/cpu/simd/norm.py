"""The two passes of an RMSNorm of one row in float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.exp2 import constant
from sarathi_pp_kernels.cpu.simd.registers import (
    I32,
    LANES,
    WORDS,
    each_line,
    floats_at,
    fma,
    index,
    load_line,
    spread,
)


@intrinsic
def sum_of_squares(typing, source, num_lines):  # type: ignore[no-untyped-def]
    """Return the sum of the squares of 16 * num_lines float32. num_lines is at least 1.

    Each lane sums its own values in ascending order. Then lanes 8, 4, 2 and 1 apart are added.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, num_lines_ = arguments
        with each_line(builder, num_lines_, constant(0.0)) as (line, loop):
            values = load_line(builder, source_, line)
            loop.carry(fma(builder, values, values, loop.carried[0]))
        held = loop.results[0]
        for distance in (8, 4, 2, 1):
            lanes = [(lane + distance) % LANES for lane in range(LANES)]
            held = builder.fadd(held, builder.shuffle_vector(held, held, ir.Constant(WORDS, lanes)))
        return builder.extract_element(held, ir.Constant(I32, 0))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def scale_lines(typing, source, factor, weight, to, num_lines):  # type: ignore[no-untyped-def]
    """Compute to = (source * factor) * weight for 16 * num_lines float32. `to` may be `source`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, factor_, weight_, to_, num_lines_ = arguments
        factors = spread(builder, factor_)
        with each_line(builder, num_lines_) as (line, _):
            scaled = builder.fmul(load_line(builder, source_, line), factors)
            product = builder.fmul(scaled, load_line(builder, weight_, line))
            builder.store(product, floats_at(builder, to_, builder.mul(line, index(LANES))), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), generate
