"""Powers of two, in every lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from sarathi_pp_kernels.cpu.simd.registers import FLOATS, I16, I32, LANES, call, fma

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


def constant(value: float) -> Any:
    """Return a float in all lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def nearest_whole(builder: Any, exponent: Any) -> Any:
    return call(builder, "llvm.rint.v16f32", FLOATS, [exponent])


def power(builder: Any, whole: Any, rest: Any, fit: Sequence[float]) -> Any:
    """Return 2^(whole + rest) for |rest| of at most 1/2. NaN stays NaN. `fit` is ROUGH or FINE."""
    found = constant(fit[-1])
    for coefficient in reversed(fit[:-1]):
        found = fma(builder, found, rest, constant(coefficient))
    every, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [found, whole, found, every, nearest])
