"""Linear layers in float32: right up to rounding, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sarathi_pp.model.fuse.float_linear import NARROW, FloatLinear, float_product, has_float_gemm
from sarathi_pp.model.fuse.packed_linear import packed_class
from tests.processors import environment_of, why_not

pytestmark = pytest.mark.skipif(not has_float_gemm(), reason="this processor has no AVX2, or numba is not here")

# Sizes around every height of a tile, with AVX512 and with AVX2.
TYPES = [torch.float32, *NARROW]
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18, 19, 24, 25, 37, 130]


def float_linear(
    inputs: int, outputs: int, *, bias: bool = False, seed: int = 0, held: torch.dtype = torch.float32
) -> nn.Linear:
    """Return a linear layer with a float32 bias, and a weight of the type `held`."""
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight.data = linear.weight.data.to(held)
    return linear


def widened(linear: nn.Linear) -> nn.Linear:
    wide = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None).requires_grad_(False)
    wide.load_state_dict(linear.state_dict())
    return wide


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(1, 1, False), (2, 16, False), (96, 160, True), (515, 113, True), (514, 47, False)]
)
@torch.inference_mode()
def test_any_shape_is_summed_in_float32(inputs: int, outputs: int, bias: bool, held: torch.dtype) -> None:
    for rows in ROWS:
        linear = float_linear(inputs, outputs, bias=bias, seed=rows, held=held)
        x = torch.randn(1, rows, inputs)
        y = FloatLinear(linear)(x)
        assert y.shape == (1, rows, outputs) and y.dtype == torch.float32
        allowed = 1e-6 * (x.double().abs() @ linear.weight.double().abs().T + 1)
        assert bool(((y.double() - exact(linear, x)).abs() <= allowed).all()), rows


class LargeTensors(TorchDispatchMode):
    """Counts tensors of at least `num_bytes` that operations make in new memory."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.count = num_bytes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().nbytes() >= self.num_bytes:
            before = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
            self.count += made.untyped_storage().data_ptr() not in before
        return made


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize("outputs", [64, 79])
def test_packing_makes_no_copy_but_the_packed_weight(outputs: int, held: torch.dtype) -> None:
    """Padding the whole weight would. The last panel alone is padded."""
    linear = float_linear(130, outputs, held=held)
    with LargeTensors(linear.weight.nbytes // 2) as large:
        packed = FloatLinear(linear)
    assert large.count <= 1 and packed.num_bytes() >= linear.weight.nbytes


@pytest.mark.parametrize("held", TYPES)
@torch.inference_mode()
def test_neither_batch_mates_nor_tiles_change_a_bit(held: torch.dtype) -> None:
    linear = FloatLinear(float_linear(194, 88, bias=True, held=held))
    x = torch.randn(max(ROWS), 194)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
        assert torch.equal(linear(x[len(x) - rows :]), alone[len(x) - rows :]), rows


@pytest.mark.parametrize("held", NARROW)
@torch.inference_mode()
def test_a_narrow_weight_keeps_its_type_and_gives_the_bits_of_a_widened_one(held: torch.dtype) -> None:
    """All finite values of the type occur, subnormal ones too."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(held)
    every = torch.cat([every[every.isfinite()], torch.zeros(1024, dtype=held)])
    linear = nn.Linear(130, len(every) // 130, bias=False).requires_grad_(False)
    linear.weight.data = every[: 130 * (len(every) // 130)].view(-1, 130)
    stored, wide, x = FloatLinear(linear), FloatLinear(widened(linear)), torch.randn(9, 130)
    assert stored.num_bytes() == wide.num_bytes() // 2
    assert torch.equal(stored(x), wide(x)) and torch.equal(float_product(x, linear.weight, None), wide(x))


@pytest.mark.parametrize("held", NARROW)
@torch.inference_mode()
def test_layers_of_two_types_become_float32(held: torch.dtype) -> None:
    one, other, x = float_linear(64, 32, held=held), float_linear(64, 32, seed=1), torch.randn(3, 64)
    merged = FloatLinear(one, other)
    assert merged.num_bytes() == 64 * 64 * 4
    assert torch.equal(merged(x), torch.cat([FloatLinear(widened(one))(x), FloatLinear(other)(x)], -1))


@pytest.mark.parametrize("held", TYPES)
@torch.inference_mode()
def test_nan_and_infinity_stay_in_their_outputs(held: torch.dtype) -> None:
    linear = float_linear(32, 32, held=held)
    linear.weight[3, 4], linear.weight[5, 6] = torch.nan, torch.inf
    y = FloatLinear(linear)(torch.randn(5, 32))
    assert bool(y[:, 3].isnan().all()) and bool(y[:, 5].isinf().all())
    assert bool(y[:, [0, 1, 2, 4, 31]].isfinite().all())


@pytest.mark.parametrize("held", TYPES)
@torch.inference_mode()
def test_a_long_sum_is_as_exact_as_its_blocks(held: torch.dtype) -> None:
    """A single sum of 16,384 positive products is off by a hundred units of the last place, and more."""
    torch.manual_seed(0)
    linear = nn.Linear(16384, 16, bias=False).requires_grad_(False)
    linear.weight.data = torch.rand(16, 16384).to(held)
    x = torch.rand(64, 16384)
    relative = (FloatLinear(linear)(x).double() / exact(linear, x) - 1).abs()
    assert relative.max() < 24 * 2**-24, relative.max() * 2**24


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
    for held in TYPES:
        linear = FloatLinear(float_linear(194, 88, bias=True, held=held))
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
@pytest.mark.parametrize(("num_threads", "held"), [(1, torch.float32), (3, torch.bfloat16), (3, torch.float16)])
@torch.inference_mode()
def test_a_product_without_packing_gives_the_same_bits(
    inputs: int, outputs: int, num_threads: int, held: torch.dtype
) -> None:
    linear = float_linear(inputs, outputs, bias=True, held=held)
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
    bare.weight.data = linear.weight.data
    return bare


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.float64)),
        (torch.zeros(3, 8), torch.zeros(4, 9)),
        (torch.zeros(3, 8, dtype=torch.float64), torch.zeros(4, 8)),
        (torch.zeros(3, 0), torch.zeros(4, 0)),
    ],
)
def test_a_wrong_type_or_shape_is_refused_and_not_misread(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(AssertionError):
        float_product(x, weight, None)
