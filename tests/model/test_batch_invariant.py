"""Float32 products whose rows depend only on the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.model.batch_invariant import batch_invariant_mode

CPU = torch.device("cpu")
Product = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Product] = {
    "linear": functional.linear,
    "with bias": lambda x, weight: functional.linear(x, weight, weight[:, 0]),
    "addmm": lambda x, weight: torch.addmm(weight[:, 0], x, weight.T),
    "matmul": lambda x, weight: torch.matmul(x, weight.T),
    "operator": lambda x, weight: x @ weight.T,
    "method": lambda x, weight: x.matmul(weight.T),
}


@pytest.fixture(params=[1, 2, 3, 4, 6], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", PRODUCTS)
@settings(max_examples=30)
@given(
    total=st.integers(1, 120),
    first=st.integers(0, 119),
    inputs=st.sampled_from([8, 48, 512, 1000]),
    outputs=st.sampled_from([3, 48, 320]),
)
def test_a_row_is_the_same_bits_in_any_company(kind: str, total: int, first: int, inputs: int, outputs: int) -> None:
    random = torch.Generator().manual_seed(total)
    x, weight = torch.randn(120, inputs, generator=random), torch.randn(outputs, inputs, generator=random)
    with batch_invariant_mode(torch.float32, CPU):
        whole = PRODUCTS[kind](x, weight)
        some = PRODUCTS[kind](x[first : first + total], weight)
        in_batches = PRODUCTS[kind](x[None, first : first + total], weight) if kind != "addmm" else some[None]
    assert some.equal(whole[first : first + total]) and in_batches.equal(some[None])
    torch.testing.assert_close(some, PRODUCTS[kind](x[first : first + total], weight), atol=1e-3, rtol=1e-4)


CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "module": nn.SiLU(),
    "gelu": functional.gelu,
    "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "tanh method": lambda x: x.tanh(),
    "cos": lambda x: x.cos(),
    "sin": lambda x: x.sin(),
    "exp": torch.exp,
}


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("width", [8, 48, 1000, 1376])
def test_a_curve_is_the_same_bits_in_any_company(kind: str, width: int) -> None:
    x = torch.randn(60, width, generator=torch.Generator().manual_seed(width))
    take = CURVES[kind]
    with batch_invariant_mode(torch.float32, CPU):
        whole = take(x)
        for first, end in ((0, 1), (1, 2), (5, 8), (59, 60), (0, 50), (50, 60)):
            assert take(x[first:end]).equal(whole[first:end])
        assert take(x.T).equal(whole.T) and take(x[None]).equal(whole[None])
    torch.testing.assert_close(whole, take(x))


def test_other_products_and_dtypes_pass_through() -> None:
    x = torch.randn(3, 8)
    with batch_invariant_mode(torch.float32, CPU):
        for dtype in (torch.float64, torch.bfloat16):
            layer = nn.Linear(8, 5, dtype=dtype)
            assert layer(x.to(dtype)).equal(functional.linear(x.to(dtype), layer.weight, layer.bias))
        assert (x[0] @ x.T).shape == (3,)
        assert torch.matmul(x[None], x.T[None]).shape == (1, 3, 3)
        assert functional.linear(x[:0], x).shape == (0, 3)
        assert functional.linear(x, weight=x).shape == (3, 3)
        assert torch.addmm(x @ x.T, x, x.T).shape == (3, 3)
        out = torch.empty(3, 3)
        assert torch.matmul(x, x.T, out=out) is out and out.allclose(x @ x.T)
        kept = x.clone()
        assert functional.silu(kept, inplace=True) is kept and kept.allclose(functional.silu(x))
        assert functional.silu(x[:0]).shape == (0, 8)
    assert not isinstance(batch_invariant_mode(torch.bfloat16, CPU), torch.overrides.TorchFunctionMode)
    assert not isinstance(batch_invariant_mode(torch.float32, torch.device("cuda")), torch.overrides.TorchFunctionMode)
