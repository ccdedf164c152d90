"""SiLU of one row, multiplied with another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.exp2 import FINE, constant, nearest_whole, power, power_by_bits
from sarathi_pp_kernels.cpu.simd.registers import (
    LANES,
    each_line,
    fma,
    index,
    load_values,
    round_values,
    store_values,
)

# The base 2 logarithm of e, in two parts whose sum is exact to 1e-15.
_LOG2_E, _LOG2_E_REST = 1.4426950216293335, 1.925963033500693e-08
# Below the first, 1 + exp(x) is 1 in float32. Above the second, it is infinite.
_LOWEST, _HIGHEST = -100.0, 90.0


@intrinsic(prefer_literal=True)
def silu_multiply_lines(typing, size, gate, up, to, num_lines):  # type: ignore[no-untyped-def]
    """Compute to = silu(gate) * up for 16 * num_lines values.

    silu(x) = x / (1 + exp(-x)) is rounded before it is multiplied.

    NaN stays NaN, and -inf gives NaN, as in torch.

    Args:
        size: bytes of a value, a literal: 2 for bfloat16, which needs AVX512-BF16, and 4 for float32.
    """
    num_bytes = size.literal_value
    power_of = power if num_bytes == 2 else power_by_bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, gate_, up_, to_, num_lines_ = arguments
        with each_line(builder, num_lines_) as (line, _):
            place = builder.mul(line, index(LANES))
            x, factor = (load_values(builder, num_bytes, row, place) for row in (gate_, up_))
            gated = silu_of(builder, x, power_of)
            product = builder.fmul(round_values(builder, num_bytes, gated), factor)
            store_values(builder, num_bytes, product, to_, place)
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 4), generate


def silu_of(builder: Any, x: Any, power_of: Callable[..., Any]) -> Any:
    """Return silu(x) in every lane. NaN stays NaN, and -inf gives NaN.

    Args:
        power_of: `power` or `power_by_bits`, which any processor has.
    """
    lowest, highest = constant(_LOWEST), constant(_HIGHEST)
    # The comparisons keep NaN: each one with NaN is false.
    less = builder.fneg(x)
    less = builder.select(builder.fcmp_ordered(">", lowest, less), lowest, less)
    less = builder.select(builder.fcmp_ordered("<", highest, less), highest, less)
    whole = nearest_whole(builder, builder.fmul(less, constant(_LOG2_E)))
    rest = fma(builder, less, constant(_LOG2_E), builder.fneg(whole))
    rest = fma(builder, less, constant(_LOG2_E_REST), rest)
    return builder.fdiv(x, builder.fadd(constant(1.0), power_of(builder, whole, rest, FINE)))
