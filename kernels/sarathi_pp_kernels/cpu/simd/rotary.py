"""The rotary embedding of a head."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import (
    LANES,
    each_line,
    halves_at,
    index,
    to_bf16,
    to_float,
)


@intrinsic
def rotate_lines(typing, source, to, cos, sin, num_lines):  # type: ignore[no-untyped-def]
    """Apply the rotary embedding to one head of 32 * num_lines bfloat16: channel c with channel c + 16 * num_lines.

    It computes x * cos + (-x[half:], x[:half]) * sin, with both products and their sum rounded. `to` may be `source`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, to_, cos_, sin_, num_lines_ = arguments
        half = builder.mul(num_lines_, index(LANES))
        with each_line(builder, num_lines_) as (line, _):
            first = builder.mul(line, index(LANES))
            places = first, builder.add(first, half)
            (a, b), cosines, sines = (
                [to_float(builder, builder.load(halves_at(builder, array, at), align=2)) for at in places]
                for array in (source_, cos_, sin_)
            )
            for at, own, other, cosine, sine in zip(places, (a, b), (builder.fneg(b), a), cosines, sines, strict=True):
                parts = (
                    to_float(builder, to_bf16(builder, builder.fmul(value, factor)))
                    for value, factor in ((own, cosine), (other, sine))
                )
                builder.store(to_bf16(builder, builder.fadd(*parts)), halves_at(builder, to_, at), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
