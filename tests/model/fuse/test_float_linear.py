"""Linear layers in float32: right up to rounding, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from sarathi_pp.model.fuse.float_linear import FloatLinear, float_product, has_float_gemm
from sarathi_pp.model.fuse.packed_linear import packed_class
from tests.processors import environment_of, why_not

pytestmark = pytest.mark.skipif(not has_float_gemm(), reason="this processor has no AVX2, or numba is not here")

# Sizes around every height of a tile, with AVX512 and with AVX2.
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18, 19, 24, 25, 37, 130]


def float_linear(inputs: int, outputs: int, *, bias: bool = False, seed: int = 0, bf16: bool = False) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    if bf16:
        linear.weight.copy_(linear.weight.bfloat16())
    return linear


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(1, 1, False), (2, 16, False), (96, 160, True), (515, 113, True), (514, 47, False)]
)
@torch.inference_mode()
def test_any_shape_is_summed_in_float32(inputs: int, outputs: int, bias: bool, bf16: bool) -> None:
    for rows in ROWS:
        linear = float_linear(inputs, outputs, bias=bias, seed=rows, bf16=bf16)
        x = torch.randn(1, rows, inputs)
        y = FloatLinear(linear)(x)
        assert y.shape == (1, rows, outputs) and y.dtype == torch.float32
        allowed = 1e-6 * (x.double().abs() @ linear.weight.double().abs().T + 1)
        assert bool(((y.double() - exact(linear, x)).abs() <= allowed).all()), rows


@pytest.mark.parametrize("bf16", [False, True])
@torch.inference_mode()
def test_neither_batch_mates_nor_tiles_change_a_bit(bf16: bool) -> None:
    linear = FloatLinear(float_linear(194, 88, bias=True, bf16=bf16))
    x = torch.randn(max(ROWS), 194)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
        assert torch.equal(linear(x[len(x) - rows :]), alone[len(x) - rows :]), rows


@torch.inference_mode()
def test_a_weight_of_bfloat16_is_stored_as_such_with_the_same_results() -> None:
    """One value that is not bfloat16 is enough to store all weights as float32."""
    linear = float_linear(130, 40, bf16=True)
    stored, x = FloatLinear(linear), torch.randn(9, 130)
    assert stored.num_bytes() == 48 * 130 * 2
    linear.weight[7, 5] += 2**-12 * linear.weight[7, 5].abs()
    whole = FloatLinear(linear)
    assert whole.num_bytes() == 48 * 130 * 4
    kept = [output for output in range(40) if output != 7]
    assert torch.equal(stored(x)[:, kept], whole(x)[:, kept])
    assert not torch.equal(stored(x)[:, 7], whole(x)[:, 7])


@torch.inference_mode()
def test_nan_is_no_bfloat16_and_stays_in_its_output() -> None:
    linear = float_linear(32, 32, bf16=True)
    linear.weight[3, 4] = torch.nan
    packed = FloatLinear(linear)
    assert packed.num_bytes() == 32 * 32 * 4
    y = packed(torch.randn(5, 32))
    assert bool(y[:, 3].isnan().all()) and not bool(y[:, [0, 1, 2, 4, 31]].isnan().any())


@pytest.mark.parametrize("num_threads", [2, 3, 5])
@torch.inference_mode()
def test_threads_change_no_bit(num_threads: int) -> None:
    linear, x = FloatLinear(float_linear(64, 352)), torch.randn(50, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = linear(x)
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(linear(x), alone) for _ in range(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("widths", [(64, 96), (64, 33), (33, 64), (5, 6)])
@torch.inference_mode()
def test_several_layers_with_one_input_are_one(widths: tuple[int, int]) -> None:
    one, other = float_linear(48, widths[0], bias=True, seed=1), float_linear(48, widths[1], seed=2)
    x = torch.randn(7, 48)
    assert torch.equal(FloatLinear(one, other)(x), torch.cat([FloatLinear(one)(x), FloatLinear(other)(x)], -1))


@torch.inference_mode()
def test_rows_need_not_be_contiguous_nor_finite() -> None:
    linear = FloatLinear(float_linear(32, 32))
    x = torch.randn(32, 10).T
    assert torch.equal(linear(x), linear(x.contiguous()))
    x = x.contiguous()
    clean = linear(x)
    x[3, 5] = torch.nan
    broken = linear(x)
    assert bool(broken[3].isnan().all())
    kept = [row for row in range(10) if row != 3]
    assert torch.equal(broken[kept], clean[kept])


def test_float32_is_packed_and_another_dtype_is_not_misread() -> None:
    linear = float_linear(33, 40)
    assert packed_class(linear) is FloatLinear
    assert packed_class(nn.Linear(32, 32, dtype=torch.float16)) is None
    with pytest.raises(AssertionError, match="bfloat16"):
        FloatLinear(linear)(torch.zeros(3, 33, dtype=torch.bfloat16))


_DIGEST = """
from tests.model.fuse.test_float_linear import digest
print(digest())
"""


@torch.inference_mode()
def digest() -> str:
    """Return a digest of the bits of some products."""
    found = hashlib.sha256()
    for bf16 in (False, True):
        linear = FloatLinear(float_linear(194, 88, bias=True, bf16=bf16))
        for rows in ROWS:
            torch.manual_seed(rows)
            found.update(linear(torch.randn(rows, 194)).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.skipif(bool(why_not("avx2")), reason=str(why_not("avx2")))
def test_every_processor_gives_the_same_bits() -> None:
    """With AVX2 alone, other tiles are compiled. Each sum has the same order."""
    environment = {**os.environ, **environment_of("avx2")}
    found = subprocess.run([sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest()


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (96, 160), (515, 113), (16, 16), (15, 33)])
@pytest.mark.parametrize("num_threads", [1, 3])
@torch.inference_mode()
def test_a_product_without_packing_gives_the_same_bits(inputs: int, outputs: int, num_threads: int) -> None:
    linear = float_linear(inputs, outputs, bias=True)
    packed, before = FloatLinear(linear), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            assert torch.equal(float_product(x, linear.weight, linear.bias), packed(x)), rows
            columns = linear.weight.T.contiguous().T
            assert torch.equal(float_product(x, columns, None), FloatLinear(_without_bias(linear))(x)), rows
    finally:
        torch.set_num_threads(before)


def _without_bias(linear: nn.Linear) -> nn.Linear:
    bare = nn.Linear(linear.in_features, linear.out_features, bias=False).requires_grad_(False)
    bare.weight.copy_(linear.weight)
    return bare


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.bfloat16)),
        (torch.zeros(3, 8), torch.zeros(4, 9)),
        (torch.zeros(3, 8, dtype=torch.float64), torch.zeros(4, 8)),
        (torch.zeros(3, 0), torch.zeros(4, 0)),
    ],
)
def test_a_wrong_type_or_shape_is_refused_and_not_misread(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(AssertionError):
        float_product(x, weight, None)
