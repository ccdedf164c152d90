"""Products of few rows, against products in float64 with the expanded weights. Rows do not depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sarathi_pp_kernels.triton import few_rows
from sarathi_pp_kernels.triton.expand import reference_expand
from sarathi_pp_kernels.triton.expand_mxfp4 import reference_expand_mxfp4
from sarathi_pp_kernels.triton.few_rows import MOST_ROWS, multiply_float8, multiply_mxfp4, reference_multiply
from torch import Tensor

from tests.kernels.triton.bounds import checked_addresses

# The interpreter cannot multiply bfloat16.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def float8_weight(
    count: int, shape: tuple[int, int], block: tuple[int, int], first: tuple[int, int], *, e5m2: bool = False
) -> tuple[Tensor, Tensor]:
    """Return finite codes of about normal distribution, and scales."""
    codes = normal(count, *shape).to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).view(torch.uint8)
    blocks = (-(-(start + size) // length) for start, size, length in zip(first, shape, block, strict=True))
    return codes, normal(count, *blocks).abs() + 0.1


def mxfp4_weight(count: int, outputs: int, groups: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs + groups)
    codes = torch.randint(0, 256, (count, outputs, groups * 16), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(118, 132, (count, outputs, groups), dtype=torch.uint8, generator=generator)


def expanded(codes: Tensor, scales: Tensor, dtype: torch.dtype, *block: Any, e5m2: bool = False) -> Tensor:
    target = torch.zeros(codes.shape, dtype=dtype)
    reference_expand(codes, scales, target, *block, e5m2=e5m2)
    return target


def expanded_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.zeros((len(codes), codes.shape[2] * 2, codes.shape[1]), dtype=dtype)
    reference_expand_mxfp4(codes, scales, target)
    return target.mT


def experts_of_rows(rows: int, slots: int, count: int) -> Tensor:
    """Return different experts for each row. A row has one slot without an expert, and expert 0 has no row."""
    generator = torch.Generator().manual_seed(rows + slots)
    index = torch.stack([torch.randperm(count - 1, generator=generator)[:slots] + 1 for _ in range(rows)])
    index[0, -1] = count
    return index


def expect_close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < LIMITS[found.dtype], f"error {error:.1e}"


# Outputs and inputs of a matrix, its blocks, and the place in the first block.
LINEARS = [
    ((64, 128), (128, 128), (0, 0)),
    ((70, 300), (32, 128), (0, 0)),
    ((9, 48), (1, 48), (0, 0)),
    ((130, 600), (130, 600), (0, 0)),
    ((40, 100), (32, 16), (31, 5)),
    ((5, 20), (2, 3), (1, 2)),
]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("shape", "block", "first"), LINEARS)
def test_linear_layers(
    shape: tuple[int, int], block: tuple[int, int], first: tuple[int, int], dtype: torch.dtype
) -> None:
    """Outputs are those of a part of a merged layer."""
    for rows, e5m2 in ((1, False), (5, True), (16, False)):
        codes, scales = float8_weight(1, shape, block, first, e5m2=e5m2)
        x, bias = normal(rows, 1, shape[1], dtype=dtype), normal(1, shape[0], dtype=dtype)
        out = torch.full((rows, 1, 2 * shape[0]), 5.0, dtype=dtype)
        with checked_addresses():
            multiply_float8(x, codes, scales, out[..., shape[0] :], block, first, e5m2=e5m2, bias=bias)
        weight = expanded(codes, scales, dtype, block, first, e5m2=e5m2)
        expect_close(out[..., shape[0] :], reference_multiply(x, weight, None, bias))
        assert (out[..., : shape[0]] == 5.0).all()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_experts(form: str, dtype: torch.dtype) -> None:
    """The first product has the same input for all slots of a row, and the second one has one for each slot."""
    count, outputs, groups, slots = 6, 70, 9, 3
    inputs, bias = 32 * groups, normal(count, outputs, dtype=dtype)
    for rows in (1, 7, 16):
        index = experts_of_rows(rows, slots, count)
        for x in (normal(rows, 1, inputs, dtype=dtype), normal(rows, slots, inputs, dtype=dtype)):
            out = torch.full((rows, slots, outputs), 5.0, dtype=dtype)
            with checked_addresses():
                if form == "fp8":
                    codes, scales = float8_weight(count, (outputs, inputs), (64, 128), (0, 0))
                    weight = expanded(codes, scales, dtype, (64, 128))
                    multiply_float8(x, codes, scales, out, (64, 128), index=index, bias=bias)
                else:
                    codes, scales = mxfp4_weight(count, outputs, groups)
                    weight = expanded_mxfp4(codes, scales, dtype)
                    multiply_mxfp4(x, codes, scales, out, index, bias)
            expect_close(out, reference_multiply(x, weight, index, bias))
            assert (out[0, -1] == 0).all()


@pytest.mark.parametrize("form", ["linear", "fp8", "mxfp4"])
def test_rows_do_not_depend_on_each_other(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a row are the same alone, among others, and in another place."""
    monkeypatch.setattr(few_rows, "_LEAST_STEPS", 1)  # several parts
    count, outputs, groups, slots = 5, 40, 20, 1 if form == "linear" else 2
    x = normal(MOST_ROWS, slots, 32 * groups)
    index = None if form == "linear" else experts_of_rows(MOST_ROWS, slots, count)
    parts = []
    add_up = few_rows._add_up
    monkeypatch.setattr(few_rows, "_add_up", lambda sums, *rest: (parts.append(len(sums)), add_up(sums, *rest)))

    def product(chosen: list[int]) -> Tensor:
        out = torch.zeros(len(chosen), slots, outputs)
        own = None if index is None else index[chosen]
        if form == "mxfp4":
            assert own is not None
            multiply_mxfp4(x[chosen], *mxfp4_weight(count, outputs, groups), out, own)
        else:
            codes, scales = float8_weight(1 if own is None else count, (outputs, 32 * groups), (32, 64), (0, 0))
            multiply_float8(x[chosen], codes, scales, out, (32, 64), index=own)
        return out

    whole = product(list(range(MOST_ROWS)))
    for chosen in ([3], [15, 0, 7], list(range(MOST_ROWS))[::-1]):
        assert torch.equal(product(chosen), whole[chosen])
    assert set(parts) in ({5}, {10}), "the number of parts depends on the weight alone"


def test_wrong_shapes_are_refused() -> None:
    codes, scales = float8_weight(1, (8, 32), (8, 32), (0, 0))
    good = normal(17, 1, 32)
    for x, out in (
        (good, torch.zeros(17, 1, 8)),
        (good[:3, :, :16], torch.zeros(3, 1, 8)),
        (good[:3], torch.zeros(3, 1, 8, dtype=torch.float16)),
        (good[:3], torch.zeros(3, 1, 9)),
        (good[:3], torch.zeros(3, 2, 8)),
        (good[:3].expand(3, 3, 32), torch.zeros(3, 2, 8)),
    ):
        with pytest.raises(AssertionError):
            multiply_float8(x, codes, scales, out, (8, 32))
