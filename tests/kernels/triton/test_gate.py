"""The gate of an MLP equals silu and a product, whatever the size of the gate."""

from __future__ import annotations

import pytest
import torch
from sarathi_pp_kernels.triton.gate import reference_silu_multiply, silu_multiply


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float32, 2**-22), (torch.float16, 2**-10)])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 72), (2, 1100)])
def test_a_gate_is_silu_times_up(rows: int, width: int, dtype: torch.dtype, ulp: float) -> None:
    torch.manual_seed(width)
    both = (4 * torch.randn(1, rows, 2 * width)).to(dtype)
    both[0, 0, :2] = torch.tensor([3e4, -3e4])  # outside exp's range, both ways
    both[0, 0, width : width + 2] = 0.5
    found, expected = silu_multiply(both), reference_silu_multiply(both)
    assert found.shape == (1, rows, width) and found.dtype == dtype
    assert torch.allclose(found, expected, rtol=ulp, atol=1e-7)


def test_no_rows() -> None:
    assert silu_multiply(torch.empty(1, 0, 8)).shape == (1, 0, 4)
