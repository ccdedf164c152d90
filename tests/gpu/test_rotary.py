"""Rotated queries and the keys and values that reach their pages, as compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.comparison import BF16, DEVICE, DTYPES, F32, NAMES, Pairs, compare, normal, sized

LIMITS = {BF16: 2e-3, F32: 2e-6}
PAGE_SIZE = 16
# Pages that are written. All other pages of a pool are before them.
WRITTEN = 64
# Rows, heads, KV heads, channels.
SHAPES = sized(
    [(1, 32, 8, 128), (64, 32, 8, 128), (515, 32, 8, 128), (70, 8, 4, 64), (9, 4, 2, 16), (40, 28, 4, 128)],
    tiny=[(3, 4, 2, 16)],
)


def compare_rotary(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, pages: int, norms: bool) -> None:
    from sarathi_pp_kernels.triton.rotary import reference_rotate_and_write, rotate_and_write

    def rotated() -> Pairs:
        qkv = normal(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        angle = torch.rand(rows, dim // 2, device=DEVICE) * 6.28
        cos, sin = (torch.cat([half, half], -1).to(dtype) for half in (angle.cos(), angle.sin()))
        place = torch.randperm(WRITTEN * PAGE_SIZE)[:rows].to(DEVICE) + (pages - WRITTEN) * PAGE_SIZE
        gains = {"query_norm": normal(dim, dtype=dtype), "key_norm": normal(dim, dtype=dtype)} if norms else {}
        results: list[tuple[Tensor, ...]] = []
        for rotate in (rotate_and_write, reference_rotate_and_write):
            keys, values = (torch.empty(pages, kv_heads, PAGE_SIZE, dim, dtype=dtype, device=DEVICE) for _ in range(2))
            last = slice(pages - WRITTEN, pages)
            keys[last], values[last] = float("nan"), float("nan")
            where = (place // PAGE_SIZE, place % PAGE_SIZE)
            query = rotate(qkv.clone(), cos, sin, *where, keys, values, **gains, epsilon=1e-6)
            results.append((query.clone(), keys[last].clone(), values[last].clone()))
            del keys, values
        found, expected = results
        return {name: (found[at], expected[at]) for at, name in enumerate(("queries", "keys", "values"))}

    compare(rotated, LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), SHAPES)
def test_heads(rows: int, heads: int, kv_heads: int, dim: int, norms: bool, dtype: torch.dtype) -> None:
    compare_rotary(rows, heads, kv_heads, dim, dtype, WRITTEN, norms)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_pages_in_float8_get_the_rounded_values(dtype: torch.dtype) -> None:
    """Their codes are compared bit by bit, also with a number beyond the largest value and with NaN."""
    from sarathi_pp_kernels.triton.rotary import rotate_and_write

    from sarathi_pp.model.kv import to_float8

    rows, heads, kv_heads, dim = SHAPES[-1]
    qkv = normal(rows, (heads + 2 * kv_heads) * dim, dtype=dtype) * 100
    qkv[0, -1], qkv[1, -1], qkv[2, -1] = 1e4, float("nan"), -0.001
    angles = [torch.rand(rows, dim, device=DEVICE).to(dtype) for _ in range(2)]
    place = torch.randperm(WRITTEN * PAGE_SIZE)[:rows].to(DEVICE)
    pools = [torch.zeros(2, WRITTEN, kv_heads, PAGE_SIZE, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    pools[1] = to_float8(pools[1])
    for keys, values in pools:
        rotate_and_write(qkv.clone(), *angles, place // PAGE_SIZE, place % PAGE_SIZE, keys, values)
    expected, found = to_float8(pools[0]).float(), pools[1].float()
    assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().sum()) == 1
    assert torch.equal(found.nan_to_num(nan=1e4), expected.nan_to_num(nan=1e4))


def test_pages_far_behind() -> None:
    """The pool has more than 2^31 numbers. An index of 32 bits would write near its beginning."""
    rows, pages, shape, dtype = sized([(33, 140_000, (32, 8, 128), BF16)], tiny=[(3, 100, (4, 2, 16), F32)])[0]
    compare_rotary(rows, *shape, dtype, pages, norms=False)
