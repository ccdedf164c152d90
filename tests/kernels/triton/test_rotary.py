"""Rotated queries stay in place, rotated keys and values reach their pages, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from sarathi_pp_kernels.triton.rotary import reference_rotate_and_write, rotate_and_write
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

PAGE_SIZE = 4
PAGES = 7


def case(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rows: int = 9) -> dict[str, Tensor]:
    """Make arguments of both functions. Cosines and sines of the two halves differ, since no rule requires equality."""
    random = torch.Generator().manual_seed(heads * head_dim)
    pool = torch.full((PAGES, kv_heads, PAGE_SIZE, head_dim), torch.nan, dtype=dtype)
    places = torch.randperm(PAGES * PAGE_SIZE, generator=random)[:rows]
    return {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=random).to(dtype),
        "cos": torch.randn(rows, head_dim, generator=random).to(dtype),
        "sin": torch.randn(rows, head_dim, generator=random).to(dtype),
        "write_pages": places // PAGE_SIZE,
        "write_offsets": places % PAGE_SIZE,
        "keys": pool.clone(),
        "values": pool.clone(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (2, 2, 64)])
def test_everything_is_where_and_what_the_reference_says(
    heads: int, kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    ours = case(heads, kv_heads, head_dim, dtype)
    theirs = {name: value.clone() for name, value in ours.items()}
    gains = torch.randn(2, head_dim).to(dtype)
    extra = {"query_norm": gains[0], "key_norm": gains[1], "epsilon": 1e-2} if norms else {}
    found = rotate_and_write(**ours, **extra)
    expected = reference_rotate_and_write(**theirs, **extra)
    assert found.shape == (9, heads, head_dim) and found.data_ptr() == ours["qkv"].data_ptr()
    pairs = [(found, expected), *((ours[name], theirs[name]) for name in ("qkv", "keys", "values"))]
    for one, other in pairs:
        if norms:  # a mean of squares is summed in another order
            close = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
            assert torch.allclose(one, other, rtol=close, atol=close, equal_nan=True)
        else:
            assert torch.equal(one.nan_to_num(nan=1e4), other.nan_to_num(nan=1e4))


def test_the_reference_rotates_as_transformers_does() -> None:
    given = case(2, 1, 16, torch.float16)
    query, key, _ = given["qkv"].clone().view(9, 4, 16).split([2, 1, 1], dim=1)
    expected, _ = apply_rotary_pos_emb(query[None], key[None], given["cos"][None], given["sin"][None], unsqueeze_dim=2)
    assert torch.equal(reference_rotate_and_write(**given), expected[0])


def test_no_rows() -> None:
    given = case(2, 1, 16, torch.float32, rows=0)
    assert rotate_and_write(**given).shape == (0, 2, 16) and bool(given["keys"].isnan().all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"cos": torch.zeros(9, 8)},
        {"sin": torch.zeros(9, 16).half()},
        {"write_pages": torch.zeros(8, dtype=torch.int64)},
        {"query_norm": torch.ones(16)},
        {"keys": torch.zeros(PAGES, 1, PAGE_SIZE, 48), "values": torch.zeros(PAGES, 1, PAGE_SIZE, 48)},
    ],
)
def test_what_does_not_fit_is_refused_and_not_read_beyond_its_end(wrong: dict[str, Tensor]) -> None:
    with pytest.raises(AssertionError):
        rotate_and_write(**case(2, 1, 16, torch.float32) | wrong)
