"""Powers of two, in every lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from sarathi_pp_kernels.cpu.simd.registers import FLOATS, I16, I32, LANES, WORDS, call, fma

# Coefficients of polynomials for 2^x with |x| <= 1/2, lowest power first. Relative errors are below 4e-6 and 2e-9.
ROUGH = (1.0, 0.6931210452034274, 0.24022349038021354, 0.05592197584225338, 0.009666368515338686)
FINE = (
    1.0000000005920207,
    0.6931472056005101,
    0.2402264660871407,
    0.05550328997517382,
    0.0096185195343466,
    0.0013399860363227274,
    0.00015337576834477742,
)
# Added to a whole number of up to 22 bits, it moves the number to the lowest bits of the sum.
_WHOLE_SHIFT, _WHOLE_SHIFT_BITS = 1.5 * 2.0**23, 0x4B400000
# The least exponent whose power is not 0. Smaller powers would be subnormal, which are slow on some processors.
_LEAST_EXPONENT = -125.0
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def constant(value: float) -> Any:
    """Return a float in all lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def nearest_whole(builder: Any, exponent: Any) -> Any:
    return call(builder, "llvm.rint.v16f32", FLOATS, [exponent])


def power(builder: Any, whole: Any, rest: Any, fit: Sequence[float]) -> Any:
    """Return 2^(whole + rest) for |rest| of at most 1/2. NaN stays NaN. `fit` is ROUGH or FINE. It needs AVX512."""
    found = _power_of_rest(builder, rest, fit)
    every, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [found, whole, found, every, nearest])


def power_below_one(builder: Any, whole: Any, rest: Any) -> Any:
    """Return 2^(whole + rest) for whole <= 0 and |rest| <= 1/2, and 0 for whole < -125. NaN stays NaN.

    Any processor has these instructions. The bits are the same on all.
    """
    found = builder.fmul(_power_of_rest(builder, rest, FINE), _two_to(builder, _to_int(builder, whole)))
    return builder.select(builder.fcmp_ordered("<", whole, constant(_LEAST_EXPONENT)), constant(0.0), found)


def power_by_bits(builder: Any, whole: Any, rest: Any, fit: Sequence[float]) -> Any:
    """Return what `power` does, with instructions that any processor has. |whole| is at most 250, unless both are NaN.

    2^whole is the product of two powers whose exponents are put into their bits. The first product is exact. So the
    result is rounded once, even if it is too small for a full mantissa. The compiler must not reorder the products.
    """
    exponent = _to_int(builder, whole)
    first = builder.ashr(exponent, _words(1))
    found = builder.fmul(_power_of_rest(builder, rest, fit), _two_to(builder, first))
    return builder.fmul(found, _two_to(builder, builder.sub(exponent, first)))


def _power_of_rest(builder: Any, rest: Any, fit: Sequence[float]) -> Any:
    found = constant(fit[-1])
    for coefficient in reversed(fit[:-1]):
        found = fma(builder, found, rest, constant(coefficient))
    return found


def _to_int(builder: Any, whole: Any) -> Any:
    shifted = builder.bitcast(builder.fadd(whole, constant(_WHOLE_SHIFT)), WORDS)
    return builder.sub(shifted, _words(_WHOLE_SHIFT_BITS))


def _two_to(builder: Any, exponent: Any) -> Any:
    """Return 2^exponent for int32 exponents from -126 to 127."""
    biased = builder.add(exponent, _words(_EXPONENT_BIAS))
    return builder.bitcast(builder.shl(biased, _words(_MANTISSA_BITS)), FLOATS)


def _words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)
