"""Conversion between float32 and the codes of float8_e4m3fn: a sign bit, 4 exponent bits and 3 mantissa bits.

It uses integers, because GPUs before compute capability 8.9 have no instruction for it. The bits are those of torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Exponents of codes are biased by 7, those of float32 by 127.
_REBIASED = tl.constexpr(2.0**120)


@triton.jit
def from_codes(codes):  # type: ignore[no-untyped-def]
    """Return the float32 values of codes (uint8). A float32 with the same exponent and mantissa bits is exact."""
    wide = codes.to(tl.int8, bitcast=True).to(tl.int32)  # bits from 7 on are the sign
    small = ((wide << 20) & -0x78100000).to(tl.float32, bitcast=True)
    value = small * _REBIASED
    return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def to_codes(x):  # type: ignore[no-untyped-def]
    """Return the codes (uint8) of float32 values: of the nearest one, and of the even one of two.

    Finite values beyond 448 become 448. Infinity becomes NaN, and NaN stays NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bounded = tl.minimum(size, 0x43E00000)  # 448
    # From 2^-6 on, the last 20 of 23 mantissa bits are rounded off. Exponents are biased by 127, those of codes by 7.
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - (120 << 3)
    # Below, codes count multiples of 2^-9. In a float32 from 2^14 on, these are the last mantissa bit.
    small = (bounded.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(bounded < 0x3C800000, small, normal)  # 2^-6
    code = tl.where(size >= 0x7F800000, 0x7F, code)  # infinity and NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
