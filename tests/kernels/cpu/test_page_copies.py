"""Copies of pages in FP8 hold the exact values of their codes."""

from __future__ import annotations

import pytest
import torch
from sarathi_pp_kernels.cpu.page_copies import copy_pages

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_copied_with_its_value(dtype: torch.dtype, num_threads: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(5, 1).view(FLOAT8)
    codes.view(torch.uint8)[3] = codes.view(torch.uint8)[3].flip(0)
    pages, out = torch.tensor([3, 0, 3]), torch.full((4, 256), 7.0, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        copy_pages(codes, pages, out[:3])
    finally:
        torch.set_num_threads(before)
    expected = codes.to(dtype)[pages]
    assert torch.equal(out[:3].isnan(), expected.isnan()) and int(expected.isnan().sum()) == 6
    assert torch.equal(out[:3].nan_to_num(), expected.nan_to_num())
    assert bool((out[3] == 7).all())
    assert torch.equal(out[1].signbit()[~expected[1].isnan()], expected[1].signbit()[~expected[1].isnan()])


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 4, 5), (3, 4, 3)])
def test_pages_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        copy_pages(torch.zeros(5, 4, 3).to(FLOAT8), torch.tensor([0, 1]), torch.empty(shape))
