"""Linear layers of heads: our own product against torch's, and bits that depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from sarathi_pp.model.batch_invariant import batch_invariant_mode
from sarathi_pp.model.fuse.head_linear import HeadLinear, PackedHeadLinear, head_linear
from sarathi_pp.model.fuse.packed_linear import has_gemm

CPU = torch.device("cpu")


def operands(rows: int, heads: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * heads + outputs)
    x = torch.randn(rows, heads, inputs, generator=generator)
    return x.to(dtype), torch.randn(heads, outputs, inputs, generator=generator).to(dtype)


def shapes() -> Iterator[ParameterSet]:
    """Yield rows, heads, outputs, inputs and the type of weights; by default, a third of them."""
    of_heads = ((1, 16, 8), (3, 20, 12), (4, 50, 6), (2, 512, 128))
    held = (torch.float32, torch.bfloat16, torch.float16)
    for place, (rows, of_head) in enumerate(product((1, 2, 7, 13, 40), of_heads)):
        for number, dtype in enumerate(held):
            yield pytest.param(rows, *of_head, dtype, marks=[pytest.mark.full] * ((place + number) % 3 != 0))


@pytest.mark.parametrize(("rows", "heads", "outputs", "inputs", "held"), list(shapes()))
def test_float32_rows(rows: int, heads: int, outputs: int, inputs: int, held: torch.dtype) -> None:
    x, weight = operands(rows, heads, outputs, inputs, torch.float32)
    layer = head_linear(weight.to(held), torch.float32)
    assert type(layer) is PackedHeadLinear and layer.held_type == held
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.to(held).double())
    assert (layer(x).double() - expected).abs().max() < 1e-4
    strided = torch.cat((x.transpose(0, 1), x.transpose(0, 1)), -1).transpose(0, 1)[..., :inputs]
    assert torch.equal(layer(strided), layer(x))
    for row in range(rows):
        assert torch.equal(layer(x[row : row + 1])[0], layer(x)[row])


@pytest.mark.skipif(not has_gemm(), reason="needs AVX512-BF16")
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(1, 16, 8), (3, 20, 12), (2, 512, 128)])
def test_bfloat16_rows(heads: int, outputs: int, inputs: int) -> None:
    x, weight = operands(13, heads, outputs, inputs, torch.bfloat16)
    layer = head_linear(weight, torch.bfloat16)
    assert type(layer) is PackedHeadLinear
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert ((layer(x).double() - expected).abs() <= expected.abs() / 128 + 1e-2).all()
    assert torch.equal(layer(x[4:9]), layer(x)[4:9])


def test_other_shapes_and_types_are_torchs() -> None:
    x, weight = operands(9, 3, 20, 7, torch.float32)
    odd = head_linear(weight.bfloat16(), torch.float32)  # pairs of inputs cannot be read
    assert type(odd) is HeadLinear and odd.weight.dtype == torch.float32
    torch.testing.assert_close(odd(x), torch.einsum("thk,hnk->thn", x, weight.bfloat16().float()))
    half = head_linear(weight.half(), torch.float16)
    assert type(half) is HeadLinear
    torch.testing.assert_close(half(x.half()), torch.einsum("thk,hnk->thn", x, weight).half(), atol=0.05, rtol=0.01)


def test_torchs_product_has_the_same_bits_for_every_number_of_rows() -> None:
    x, weight = operands(13, 3, 20, 12, torch.float32)
    layer = HeadLinear(weight)
    with batch_invariant_mode(torch.float32, CPU):
        whole = layer(x)
        assert torch.equal(torch.cat([layer(x[row : row + 1]) for row in range(13)]), whole)


def test_a_product_of_no_rows_and_of_other_rows() -> None:
    x, weight = operands(3, 2, 16, 8, torch.float32)
    layer = head_linear(weight, torch.float32)
    assert layer(x[:0]).shape == (0, 2, 16)
    with pytest.raises(AssertionError):
        layer(x.bfloat16())
