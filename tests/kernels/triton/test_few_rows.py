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
def test_experts(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product has the same input for all slots of a row, and the second one has one for each slot.

    There are 5 steps in 3 parts. The last part has one step, which is not full.
    """
    monkeypatch.setattr(few_rows, "_LEAST_STEPS", 2)
    count, outputs, groups, slots = 4, 70, 18, 3
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
def test_biases_are_added_where_torch_and_transformers_add_them(form: str) -> None:
    """Sums of integers are exact in any order. So all bits are known."""
    generator = torch.Generator().manual_seed(0)
    rows, count, outputs, slots = 5, 1 if form == "linear" else 4, 70, 1 if form == "linear" else 2
    x = torch.randint(-200, 201, (rows, slots, 32), generator=generator).half()
    bias = torch.randint(-8000, 8001, (count, outputs), generator=generator).half() / 8
    index = None if form == "linear" else experts_of_rows(rows, slots, count)
    out = torch.zeros(rows, slots, outputs, dtype=torch.float16)
    if form == "mxfp4":
        codes, scales = mxfp4_weight(count, outputs, 1)[0], torch.full((count, outputs, 1), 128, dtype=torch.uint8)
        weight = expanded_mxfp4(codes, scales, torch.float16)
        assert index is not None
        multiply_mxfp4(x, codes, scales, out, index, bias)
    else:
        weight = torch.randint(-8, 9, (count, outputs, 32), generator=generator).half()
        codes, scales = weight.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones(count, 1, 1)
        multiply_float8(x, codes, scales, out, (outputs, 32), index=index, bias=bias)
    sums = reference_multiply(x, weight, index)
    biases = reference_multiply(torch.zeros_like(x), weight, index, bias)
    assert torch.equal(sums, sums.round()) and sums.abs().max() < 2**16
    of_experts, of_linear = sums.half() + biases.half(), (sums + biases).half()
    assert not torch.equal(of_experts, of_linear)
    assert torch.equal(out, of_linear if form == "linear" else of_experts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN and infinity
@pytest.mark.parametrize("dtype", LIMITS)
def test_every_float8_code_has_the_bits_of_the_expanded_weight(dtype: torch.dtype) -> None:
    """Each output has one input, whose product with 1 is the weight. Scales are rounded, and some products overflow."""
    count = 3
    codes = torch.arange(256, dtype=torch.uint8).repeat(count).view(1, 256 * count, 1)
    exponents = 8 * torch.rand(codes.shape, generator=torch.Generator().manual_seed(0)) - 4
    for scale_dtype in (torch.float32, torch.bfloat16, torch.float16):
        scales = (10**exponents).to(scale_dtype)
        for e5m2 in (False, True):
            out = torch.zeros(1, 1, 256 * count, dtype=dtype)
            multiply_float8(torch.ones(1, 1, 1, dtype=dtype), codes, scales, out, (1, 1), e5m2=e5m2)
            weight = expanded(codes, scales, dtype, (1, 1), e5m2=e5m2)
            expect_same_values(out.flatten(), weight.flatten())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", LIMITS)
def test_every_mxfp4_code_and_scale_has_the_bits_of_the_expanded_weight(dtype: torch.dtype) -> None:
    """Each output has its own pair of scale and code. Other codes are 0, so the sum of the inputs is the weight."""
    scale, code = (pair.flatten() for pair in torch.meshgrid(torch.arange(256), torch.arange(16), indexing="ij"))
    output, place = torch.arange(len(code)), (scale + 2 * code) % 32  # in both halves of bytes
    inputs = torch.zeros(len(code), 32, dtype=torch.uint8)
    inputs[output, place] = code.to(torch.uint8)
    inputs[scale == 255] = torch.arange(16, dtype=torch.uint8)[:, None]  # infinity times 0 would be NaN too
    codes, scales = (inputs[:, ::2] | inputs[:, 1::2] << 4)[None], scale.to(torch.uint8).view(1, -1, 1)
    out = torch.zeros(1, 1, len(code), dtype=dtype)
    multiply_mxfp4(torch.ones(1, 1, 32, dtype=dtype), codes, scales, out, torch.zeros(1, 1, dtype=torch.int64))
    weight = expanded_mxfp4(codes, scales, dtype)[0]
    expect_same_values(out.flatten(), weight[output, place])


def expect_same_values(found: Tensor, expected: Tensor) -> None:
    """Compare numbers, infinities and NaN. The sign of 0 is lost in a sum."""
    is_nan = expected.isnan()
    assert is_nan.any() and torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan], expected[~is_nan])


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
