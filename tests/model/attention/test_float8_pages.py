"""Attention over pages in FP8: the bits of the same backend over pages with rounded keys and values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache
from sarathi_pp.model.attention import choose_backend, numba
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard, to_float8
from tests.model.microbatches import CPU, Case, spec_for

EXTENTS = [(37, 1), (0, 40), (70, 9), (15, 1), (16, 16)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_backend = pytest.mark.parametrize("backend", ["sdpa", "numba"])


def over_rounded(case: Case) -> Case:
    """Return the microbatch of a case, over pages of the computation's type that hold its rounded keys and values."""
    plain = Case(case.extents, case.page_size, case.num_heads, case.num_kv_heads, case.head_dim, case.dtype)
    for pages, stored in (
        (plain.kv.keys(case.layer), case.kv.keys(case.layer)),
        (plain.kv.values(case.layer), case.kv.values(case.layer)),
    ):
        pages.copy_(stored)
    return plain


@every_backend
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("page_size", [3, 16])
def test_attention_sees_rounded_keys_and_values_of_all_rows(backend: str, window: int | None, page_size: int) -> None:
    """Those of the microbatch's own rows too. The expected output is written out in float64."""
    case = Case(EXTENTS, page_size, 4, 2, 16, backend=backend, float8=True)
    spec = spec_for(case, window=window, softcap=1.5, sinks=True)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2e-6, rtol=0)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 4, 2, 16), (16, 6, 2, 64), (3, 3, 3, 8)])
def test_no_bit_differs_from_pages_with_rounded_values(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    case = Case(EXTENTS, *shape, dtype, backend=backend, float8=True)
    spec = spec_for(case, window=50)
    chosen = choose_backend(backend, CPU, case.page_size)
    assert torch.equal(case.run(spec), over_rounded(case).run(spec, chosen))


@pytest.mark.parametrize(("copied_bytes", "num_parts"), [(1, 5), (20_000, 4)])
def test_copies_of_a_few_sequences_at_a_time_change_no_bit(copied_bytes: int, num_parts: int) -> None:
    case = Case(EXTENTS, 16, 4, 2, 16, backend="numba", float8=True)
    spec = spec_for(case)
    with mock.patch.object(numba, "_COPIED_BYTES", copied_bytes):
        parts = numba._Copied.of(case.inputs, case.kv, None)
        found = case.run(spec)
    assert len(parts) == num_parts and len(numba._Copied.of(case.inputs, case.kv, None)) == 1
    assert torch.equal(found, case.run(spec))


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_pages_in_the_window_of_a_row_are_copied(dtype: torch.dtype) -> None:
    case = Case([(500, 1), (300, 40), (0, 30)], 16, 4, 2, 16, dtype, backend="numba", float8=True)
    (part,) = numba._Copied.of(case.inputs, case.kv, 20)
    assert len(part.pages) == 2 + 5 + 2, "positions 481 to 500, 281 to 339 and 0 to 29"
    spec = spec_for(case, window=20)
    assert torch.equal(case.run(spec), over_rounded(case).run(spec, choose_backend("numba", CPU, 16)))


def test_memory_for_copies_is_kept_and_grows() -> None:
    attention = choose_backend("numba", CPU, 16)
    assert isinstance(attention, numba.NumbaAttention)
    places = []
    for extents in ([(70, 9)], [(15, 1)], [(170, 9)], [(37, 1)]):
        case = Case(extents, 16, 4, 2, 16, backend="numba", float8=True)
        case.run(spec_for(case), attention)
        places.append(attention._copies)
    assert places[0] is places[1] and places[2] is places[3] and places[1] is not places[2]


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_may_be_in_float8_too(backend: str, dtype: torch.dtype) -> None:
    cache, length, heads = PagedCache(1, 48, 32, latent=True), 41, 3
    latents, query = (torch.randn(length, size, 48, generator=_seeded()).to(dtype) for size in (1, heads))
    spec, outputs = AttentionSpec(48**-0.5), []
    for pages in (torch.float8_e4m3fn, dtype):
        kv = KVShard((0, 1), 5, 16, [cache], dtype, CPU, pages=pages)
        kv.keys(0).fill_(torch.nan)
        inputs = build_inputs([Span(0, length, [4, 0, 2], prompt=True)], [], 16, CPU)
        kv.write_latent(0, latents if kv.float8 else to_float8(latents).to(dtype), inputs)
        outputs.append(choose_backend(backend, CPU, 16)(query, kv, 0, inputs, spec))
    assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_kernel_that_writes_rows_gets_a_page_for_them() -> None:
    """It writes rows in the type of the computation, and `store_rows` rounds them into their pages."""
    inputs = build_inputs([Span(2, 5, [2, 0])], [], 4, CPU)
    stored: list[Tensor] = []
    for pages in (torch.float8_e4m3fn, torch.bfloat16):
        kv = KVShard((0, 1), 3, 4, [PagedCache(2, 6, 6)], torch.bfloat16, CPU, pages=pages)
        key, value = torch.randn(2, 5, 2, 6, generator=_seeded()).bfloat16()
        target: Any = kv.row_target(0, inputs)
        for place, rows in ((target.keys, key), (target.values, value)):
            assert place.dtype == torch.bfloat16
            place[target.pages, :, target.offsets] = rows
        kv.store_rows(0, target, inputs)
        pools = torch.stack([kv.keys(0).bfloat16(), kv.values(0).bfloat16()])
        found = pools[:, [2, 0]].transpose(2, 3).reshape(2, 8, 2, 6)[:, 2:7]
        stored.append(found)
    assert torch.equal(stored[0], to_float8(stored[1]).bfloat16()) and not torch.equal(*stored)
