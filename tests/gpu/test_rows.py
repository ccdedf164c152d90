"""Norms and gates as compiled. In half precision, one number in a few hundred may be rounded to its neighbour."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.comparison import BF16, DTYPES, F32, NAMES, Pairs, compare, normal, sized

LIMITS = {BF16: 2e-3, F32: 1e-6}
SIZES = sized([(1, 4096), (2048, 4096), (64, 2048), (5, 100)], tiny=[(3, 64), (2, 100)])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    from sarathi_pp_kernels.triton.norm import add_rms_norm, reference_add_rms_norm, reference_rms_norm, rms_norm

    def norms() -> Pairs:
        x, added = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype)
        weight = normal(width, dtype=dtype)
        ours, theirs = added.clone(), added.clone()
        return {
            "norm": (rms_norm(x, weight, 1e-6), reference_rms_norm(x, weight, 1e-6)),
            "norm of a sum": (add_rms_norm(x, ours, weight, 1e-6), reference_add_rms_norm(x, theirs, weight, 1e-6)),
            "sum": (ours, theirs),
        }

    compare(norms, LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    from sarathi_pp_kernels.triton.gate import reference_silu_multiply, silu_multiply

    def gates() -> Pairs:
        both = 3 * normal(rows, 2 * width, dtype=dtype)
        return {"gate": (silu_multiply(both), reference_silu_multiply(both))}

    compare(gates, LIMITS[dtype])
