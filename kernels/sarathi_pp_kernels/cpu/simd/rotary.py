"""The rotary embedding of a head."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import (
    LANES,
    each_line,
    index,
    load_values,
    round_values,
    store_values,
)


@intrinsic(prefer_literal=True)
def rotate_lines(typing, size, source, to, cos, sin, num_lines):  # type: ignore[no-untyped-def]
    """Apply the rotary embedding to one head of 32 * num_lines values: channel c with channel c + 16 * num_lines.

    It computes x * cos + (-x[half:], x[:half]) * sin, with both products and their sum rounded. `to` may be `source`.

    Args:
        size: bytes of a value, a literal: 2 for bfloat16, which needs AVX512-BF16, and 4 for float32.
    """
    num_bytes = size.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source_, to_, cos_, sin_, num_lines_ = arguments
        half = builder.mul(num_lines_, index(LANES))
        with each_line(builder, num_lines_) as (line, _):
            first = builder.mul(line, index(LANES))
            places = first, builder.add(first, half)
            (a, b), cosines, sines = (
                [load_values(builder, num_bytes, array, at) for at in places] for array in (source_, cos_, sin_)
            )
            for at, own, other, cosine, sine in zip(places, (a, b), (builder.fneg(b), a), cosines, sines, strict=True):
                parts = (
                    round_values(builder, num_bytes, builder.fmul(value, factor))
                    for value, factor in ((own, cosine), (other, sine))
                )
                store_values(builder, num_bytes, builder.fadd(*parts), to_, at)
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 5), generate
