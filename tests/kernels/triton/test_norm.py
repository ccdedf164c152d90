"""Norms of rows equal their plain references, residuals included."""

from __future__ import annotations

import pytest
import torch
from sarathi_pp_kernels.triton.norm import add_rms_norm, reference_add_rms_norm, reference_rms_norm, rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

# Relative to a value. The mean of squares is summed in another order, which changes the last bit of float32. After
# rounding to float16 this sometimes changes the last bit.
ULP = {torch.float32: 2**-22, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 48), (5, 100), (2, 1030)])
def test_a_norm_and_one_behind_a_residual_are_their_references(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, other = torch.randn(2, 1, rows, width).to(dtype)
    x *= torch.logspace(-2, 2, rows)[:, None].to(dtype)
    weight = torch.randn(width).to(dtype)
    assert torch.allclose(rms_norm(x, weight, 1e-2), reference_rms_norm(x, weight, 1e-2), rtol=ULP[dtype], atol=1e-7)
    ours, theirs = other.clone(), other.clone()
    found, expected = add_rms_norm(x, ours, weight, 1e-2), reference_add_rms_norm(x, theirs, weight, 1e-2)
    assert torch.equal(ours, theirs) and torch.allclose(found, expected, rtol=ULP[dtype], atol=1e-7)


def test_the_reference_is_the_models_own_norm() -> None:
    norm = LlamaRMSNorm(32, eps=1e-3).half().requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn(4, 32).half()
    assert torch.equal(reference_rms_norm(x, norm.weight, 1e-3), norm(x))


def test_no_rows_and_rows_that_are_strided() -> None:
    weight = torch.ones(8)
    assert rms_norm(torch.empty(1, 0, 8), weight, 1e-5).shape == (1, 0, 8)
    x = torch.randn(6, 16)[::2, ::2]
    assert torch.allclose(rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5), rtol=1e-6)


def test_a_weight_of_another_width_or_dtype_is_refused() -> None:
    for weight in (torch.ones(4), torch.ones(8).half()):
        with pytest.raises(AssertionError):
            rms_norm(torch.randn(2, 8), weight, 1e-5)
