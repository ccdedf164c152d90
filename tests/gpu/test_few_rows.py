"""Products of few rows from codes in FP8 and MXFP4, against products in float64 with the expanded weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.comparison import BF16, DEVICE, DTYPES, F16, F32, NAMES, Pairs, compare, normal, sized

# Rows, outputs and inputs. Of experts: rows, outputs, groups of 32 inputs, experts, and experts per row.
LINEARS = sized([(1, 4096, 4096), (16, 1000, 4096), (7, 130, 300), (3, 9, 48)], tiny=[(3, 70, 300)])
EXPERTS = sized([(1, 5760, 90, 32, 4), (16, 2880, 90, 32, 4), (5, 70, 9, 6, 3)], tiny=[(3, 70, 5, 4, 2)])
BLOCK = (128, 128)
LIMITS = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}


def float8_weight(count: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales in blocks, and the float32 values."""
    codes = normal(count, outputs, inputs).to(torch.float8_e4m3fn)
    scales = normal(count, -(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])).abs() + 0.1
    row, column = (torch.arange(size, device=DEVICE) // BLOCK[0] for size in (outputs, inputs))
    return codes.view(torch.uint8), scales, codes.float() * scales[:, row][:, :, column]


def mxfp4_weight(count: int, outputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales, and the float32 values, (experts, outputs, inputs)."""
    from sarathi_pp_kernels.triton.expand_mxfp4 import reference_expand_mxfp4

    codes = torch.randint(0, 256, (count, outputs, groups * 16), dtype=torch.uint8).to(DEVICE)
    scales = torch.randint(118, 132, (count, outputs, groups), dtype=torch.uint8).to(DEVICE)
    values = torch.empty((count, groups * 32, outputs)).to(DEVICE)
    reference_expand_mxfp4(codes, scales, values)
    return codes, scales, values.mT


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("sizes", LINEARS, ids=str)
def test_linear_layers(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also a row alone, which must have the bits that it has among others."""
    from sarathi_pp_kernels.triton.few_rows import multiply_float8, reference_multiply

    rows, outputs, inputs = sizes

    def products() -> Pairs:
        codes, scales, values = float8_weight(1, outputs, inputs)
        x, bias = normal(rows, 1, inputs, dtype=dtype), normal(1, outputs, dtype=dtype)
        found, last = (torch.empty((count, 1, outputs), dtype=dtype).to(DEVICE) for count in (rows, 1))
        multiply_float8(x, codes, scales, found, BLOCK, bias=bias)
        multiply_float8(x[-1:], codes, scales, last, BLOCK, bias=bias)
        assert torch.equal(last, found[-1:])
        return {"products": (found, reference_multiply(x, values.to(dtype), None, bias))}

    compare(products, LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_experts(form: str, sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """All slots of a row have the same input, or each has one. A slot without an expert is 0."""
    from sarathi_pp_kernels.triton.few_rows import multiply_float8, multiply_mxfp4, reference_multiply

    rows, outputs, groups, count, slots = sizes

    def products() -> Pairs:
        pairs = {}
        index = torch.stack([torch.randperm(count)[:slots] for _ in range(rows)]).to(DEVICE)
        index[0, -1] = count
        bias = normal(count, outputs, dtype=dtype)
        for own_slots in (1, slots):
            x = normal(rows, own_slots, groups * 32, dtype=dtype)
            found, last = (torch.empty((size, slots, outputs), dtype=dtype).to(DEVICE) for size in (rows, 1))
            if form == "fp8":
                codes, scales, values = float8_weight(count, outputs, groups * 32)
                multiply_float8(x, codes, scales, found, BLOCK, index=index, bias=bias)
                multiply_float8(x[-1:], codes, scales, last, BLOCK, index=index[-1:], bias=bias)
            else:
                codes, scales, values = mxfp4_weight(count, outputs, groups)
                multiply_mxfp4(x, codes, scales, found, index, bias)
                multiply_mxfp4(x[-1:], codes, scales, last, index[-1:], bias)
            assert torch.equal(last, found[-1:])
            pairs[f"{own_slots} inputs per row"] = found, reference_multiply(x, values.to(dtype), index, bias)
        return pairs

    compare(products, LIMITS[dtype])
