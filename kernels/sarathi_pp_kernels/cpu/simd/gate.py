"""SiLU of one row, multiplied with another."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.exp2 import FINE, constant, nearest_whole, power
from sarathi_pp_kernels.cpu.simd.registers import (
    LANES,
    each_line,
    fma,
    halves_at,
    index,
    to_bf16,
    to_float,
)

# The base 2 logarithm of e, in two parts whose sum is exact to 1e-15.
_LOG2_E, _LOG2_E_REST = 1.4426950216293335, 1.925963033500693e-08
# Below the first, 1 + exp(x) is 1 in float32. Above the second, it is infinite.
_LOWEST, _HIGHEST = -100.0, 90.0


@intrinsic
def silu_multiply_lines(typing, gate, up, to, num_lines):  # type: ignore[no-untyped-def]
    """Compute to = silu(gate) * up for 16 * num_lines bfloat16.

    silu(x) = x / (1 + exp(-x)) is rounded before it is multiplied.

    NaN stays NaN, and -inf gives NaN, as in torch.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate_, up_, to_, num_lines_ = arguments
        lowest, highest = constant(_LOWEST), constant(_HIGHEST)
        with each_line(builder, num_lines_) as (line, _):
            place = builder.mul(line, index(LANES))
            x, factor = (
                to_float(builder, builder.load(halves_at(builder, row, place), align=2)) for row in (gate_, up_)
            )
            # The comparisons keep NaN: each one with NaN is false.
            less = builder.fneg(x)
            less = builder.select(builder.fcmp_ordered(">", lowest, less), lowest, less)
            less = builder.select(builder.fcmp_ordered("<", highest, less), highest, less)
            whole = nearest_whole(builder, builder.fmul(less, constant(_LOG2_E)))
            rest = fma(builder, less, constant(_LOG2_E), builder.fneg(whole))
            rest = fma(builder, less, constant(_LOG2_E_REST), rest)
            gated = builder.fdiv(x, builder.fadd(constant(1.0), power(builder, whole, rest, FINE)))
            product = builder.fmul(to_float(builder, to_bf16(builder, gated)), factor)
            builder.store(to_bf16(builder, product), halves_at(builder, to_, place), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
