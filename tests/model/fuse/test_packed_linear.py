"""Packed linear layers: right to the last rounding, and a row's result is independent of the other rows."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sarathi_pp.model.fuse import packed_linear
from sarathi_pp.model.fuse.packed_linear import (
    OneDnnLinear,
    PackedLinear,
    fits_gemm,
    has_gemm,
    has_onednn,
    packed_class,
    warm_linears,
)

needs_gemm = pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this processor or torch has no packed bfloat16 products")

# Sizes around every height of a tile and every change of its shape.
ROWS = [0, 1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 28, 29, 33, 56, 57, 85, 112, 113, 120, 125, 256, 300]


def bf16_linear(inputs: int, outputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@needs_gemm
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(2, 16, False), (96, 160, True), (514, 112, False)])
def test_any_number_of_rows_is_summed_in_float32_and_rounded_once(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear = bf16_linear(inputs, outputs, bias=bias, seed=rows)
    x = torch.randn(1, rows, inputs).bfloat16()
    y = PackedLinear(linear)(x)
    assert y.shape == (1, rows, outputs) and y.dtype == torch.bfloat16 and y.is_contiguous()
    expected = exact(linear, x)
    # Half of the last of 8 bits, and the error of summing in float32.
    allowed = expected.abs() * 2**-8 + 1e-5 * (x.double().abs() @ linear.weight.double().abs().T) + 1e-30
    assert bool(((y.double() - expected).abs() <= allowed).all())


@needs_gemm
@pytest.mark.parametrize("most_high_rows", [0, 28, 112, 1000])
@torch.inference_mode()
def test_neither_batch_mates_nor_tiles_change_a_bit(most_high_rows: int) -> None:
    linear = PackedLinear(bf16_linear(194, 80, bias=True))
    x = torch.randn(max(ROWS), 194).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x])
    linear.most_high_rows = most_high_rows
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
        assert torch.equal(linear(x[len(x) - rows :]), alone[len(x) - rows :]), rows


class Times:
    """A clock on which a layer's call takes the time assigned to its tiles."""

    def __init__(self, slower_above: int, disturbed_rows: int = 0) -> None:
        self.slower_above = slower_above
        self.disturbed_rows = disturbed_rows
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def called(self, linear: PackedLinear, args: tuple[Tensor]) -> None:
        rows = len(args[0])
        high = rows <= linear.most_high_rows
        self.now_s += rows * (1.1 if high and rows > self.slower_above else 1.0 if high else 1.05)
        if high and rows == self.disturbed_rows:
            self.now_s += 0.08 * rows


@needs_gemm
@pytest.mark.parametrize(("slower_above", "most"), [(0, 0), (4, 4), (8, 8), (55, 28), (56, 56), (1000, 112)])
def test_the_faster_tiles_are_taken(slower_above: int, most: int) -> None:
    times = Times(slower_above)
    model = nn.Sequential(*(PackedLinear(bf16_linear(8, 16 * width)) for width in (1, 3, 2, 5)))
    for linear in model:
        linear.register_forward_pre_hook(times.called)
    warm_linears(model, 64, times.now)
    assert [linear.most_high_rows for linear in model] == [most] * 4


@needs_gemm
@pytest.mark.parametrize("disturbed_rows", [4, 16])
def test_one_disturbed_comparison_does_not_choose_the_tiles(disturbed_rows: int) -> None:
    times = Times(1000, disturbed_rows)
    linear = PackedLinear(bf16_linear(8, 16))
    linear.register_forward_pre_hook(times.called)
    warm_linears(nn.Sequential(linear), 64, times.now)
    assert linear.most_high_rows == 112


@needs_gemm
def test_tiles_are_compared_on_a_few_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(PackedLinear(bf16_linear(64, 16 * width)) for width in (5, 1, 3, 2)))
    called, times = [], Times(1000)
    for linear in model:
        linear.register_forward_pre_hook(times.called)
        linear.register_forward_pre_hook(lambda linear, args: called.append(linear.out_features))
    for widths, chosen in ((0, {16}), (3, {16, 32}), (11, {16, 32, 48, 80})):
        monkeypatch.setattr(packed_linear, "_TIMED_BYTES", widths * 64 * 32)
        called.clear()
        warm_linears(model, 8, times.now)
        assert set(called) == chosen


@needs_gemm
def test_tiles_are_compared_on_every_shape_that_finds_room_before_any_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(PackedLinear(bf16_linear(64, 16 * width)) for width in (1, 1, 1, 3, 3)))
    called, times = [], Times(1000)
    for place, linear in enumerate(model):
        linear.register_forward_pre_hook(times.called)
        linear.register_forward_pre_hook(lambda linear, args, place=place: called.append((place, len(args[0]))))
    for widths, chosen in ((1, {0}), (3, {0, 1, 2}), (4, {0, 3}), (5, {0, 3, 1}), (8, {0, 3, 1, 4}), (9, {*range(5)})):
        monkeypatch.setattr(packed_linear, "_TIMED_BYTES", widths * 64 * 32)
        called.clear()
        warm_linears(model, 8, times.now)
        assert {place for place, rows in called if rows == 4} == chosen


@needs_gemm
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_change_no_bit(num_threads: int) -> None:
    linear = PackedLinear(bf16_linear(64, 352))
    x = torch.randn(50, 64).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = linear(x)
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(linear(x), alone) for _ in range(3))
    finally:
        torch.set_num_threads(before)


@needs_gemm
def test_several_layers_with_one_input_are_one() -> None:
    gate, up = bf16_linear(48, 64, bias=True, seed=1), bf16_linear(48, 96, seed=2)
    x = torch.randn(7, 48).bfloat16()
    together = PackedLinear(gate, up)(x)
    assert torch.equal(together, torch.cat([PackedLinear(gate)(x), PackedLinear(up)(x)], -1))


@needs_gemm
def test_rows_need_not_be_contiguous_nor_finite() -> None:
    linear = bf16_linear(32, 32)
    x = torch.randn(32, 10).bfloat16().T
    assert torch.equal(PackedLinear(linear)(x), PackedLinear(linear)(x.contiguous()))
    x = x.contiguous()
    clean = PackedLinear(linear)(x)
    x[3, 5] = torch.nan
    broken = PackedLinear(linear)(x)
    assert bool(broken[3].isnan().all())
    kept = [row for row in range(10) if row != 3]
    assert torch.equal(broken[kept], clean[kept])


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 256, 257, 511, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_onednns_product_gives_the_bits_of_a_plain_linear(rows: int, bias: bool) -> None:
    linear = bf16_linear(96, 80, bias=bias, seed=rows)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    assert torch.equal(OneDnnLinear(linear)(x), linear(x))


@needs_onednn
def test_what_our_product_does_not_take_goes_to_onednn() -> None:
    for linear in (bf16_linear(96, 72), bf16_linear(33, 64)):
        assert packed_class(linear) is OneDnnLinear


@needs_onednn
@pytest.mark.parametrize("missing", [{"numba.core.registry": None}, {"sarathi_pp_kernels.cpu.simd.target": None}])
def test_without_numba_or_with_one_that_cannot_be_imported_onednn_does_it(missing: dict[str, None]) -> None:
    kept = {name: module for name, module in sys.modules.items() if name == "sarathi_pp_kernels.cpu.simd.target"}
    sys.modules.pop("sarathi_pp_kernels.cpu.simd.target", None)
    has_gemm.cache_clear()
    try:
        with mock.patch.dict(sys.modules, missing):
            assert not has_gemm() and packed_class(bf16_linear(96, 96)) is OneDnnLinear
    finally:
        has_gemm.cache_clear()
        sys.modules.update(kept)


@needs_gemm
def test_another_dtype_is_refused_and_not_misread() -> None:
    with pytest.raises(AssertionError, match="float32"):
        PackedLinear(bf16_linear(32, 32))(torch.randn(3, 32))


@needs_gemm
def test_ours_comes_first() -> None:
    assert packed_class(bf16_linear(96, 96)) is PackedLinear


def test_float16_stays_plain_and_float32_is_not_for_this_product() -> None:
    assert packed_class(nn.Linear(32, 32)) is not PackedLinear and not fits_gemm(nn.Linear(32, 32))
    assert packed_class(nn.Linear(32, 32, dtype=torch.float16)) is None


def test_without_either_product_a_linear_stays_plain() -> None:
    with mock.patch.object(packed_linear, "has_gemm", return_value=False):
        with mock.patch.object(packed_linear, "has_onednn", return_value=False):
            assert packed_class(bf16_linear(96, 96)) is None
