"""Codes of FP8 in Triton's interpreter: their bits are those of torch, and attention reads what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from sarathi_pp_kernels.triton.float8 import from_codes, to_codes
from sarathi_pp_kernels.triton.paged_attention import paged_attention
from sarathi_pp_kernels.triton.rotary import reference_rotate_and_write, rotate_and_write
from torch import Tensor

from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.kv import to_float8
from tests.kernels.triton.bounds import checked_addresses
from tests.model.microbatches import Case, spec_for

FLOAT8 = torch.float8_e4m3fn
EXTENTS = [(140, 1), (30, 40), (33, 1), (0, 9)]


@pytest.fixture(autouse=True, scope="module")
def checked() -> Iterator[None]:
    with checked_addresses():
        yield


@triton.jit
def _decode(codes, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, from_codes(tl.load(codes + at, mask=at < count, other=0)), mask=at < count)


@triton.jit
def _encode(x, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, to_codes(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)), mask=at < count)


def encoded(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8)
    _encode[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), SIZE=4096)
    return out.view(FLOAT8)


def same(found: Tensor, expected: Tensor) -> None:
    """Compare values bit by bit, with any NaN equal to any other."""
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(torch.uint8), expected[kept].view(torch.uint8))


def test_every_code_is_decoded() -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _decode[(1,)](codes, out, 256, SIZE=256)
    same(out, codes.view(FLOAT8).float())


def test_every_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    same(encoded(every).float(), to_float8(every).float())


def test_infinity_and_nan_have_the_codes_that_torch_gives_them() -> None:
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    codes = encoded(numbers).view(torch.uint8)
    assert codes.tolist() == [0x7F, 0xFF, 0x7F, 0x7E, 0xFE]
    assert torch.equal(codes, to_float8(numbers).view(torch.uint8))


def test_numbers_around_every_tie_are_rounded_as_torch_rounds_them() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:].double() + values[:-1].double()).float() / 2
    near = [ties, *(torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (-torch.inf, torch.inf))]
    numbers = torch.cat([*near, torch.tensor([464.0, 1e30, torch.inf, -torch.inf, 1e-30, -0.0])])
    same(encoded(numbers).float(), to_float8(numbers).float())


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(16, 4, 2, 16), (64, 6, 2, 48)])
def test_attention_sees_rounded_keys_and_values(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    case = Case(EXTENTS, *shape, dtype, float8=True)
    spec = spec_for(case, window=window, softcap=2.0, sinks=True)
    found = case.run(spec, TritonAttention())
    tolerance = 3e-6 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.double(), case.expected(spec), atol=tolerance, rtol=0)
    torch.testing.assert_close(found, case.run(spec, SdpaAttention()), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_bit_differs_from_pages_with_rounded_values(dtype: torch.dtype) -> None:
    case = Case(EXTENTS, 16, 4, 2, 16, dtype, float8=True)
    spec, backend = spec_for(case), TritonAttention()
    found = case.run(spec, backend)
    assert backend._microbatch is not None
    work = backend._microbatch.work(None, 2, case.kv)
    pools = (case.kv.keys(case.layer).to(dtype), case.kv.values(case.layer).to(dtype))
    plain = paged_attention(case.query, *pools, case.inputs.pages, work, scaling=spec.scaling, softcap=None, sinks=None)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norms", [False, True])
def test_the_fused_write_rounds_as_the_plain_one(norms: bool, dtype: torch.dtype) -> None:
    """Keys and values are rounded to the computation's type first, as the plain write gets them."""
    given = _heads(dtype)
    gains = torch.ones(2, 16, dtype=dtype)
    extra: dict[str, Any] = {"query_norm": gains[0], "key_norm": gains[1], "epsilon": 1e-2} if norms else {}
    codes, plain, reference = ({name: value.clone() for name, value in given.items()} for _ in range(3))
    for each in (codes, reference):
        each["keys"], each["values"] = (each[name].to(FLOAT8) for name in ("keys", "values"))
    query = rotate_and_write(**codes, **extra)
    assert torch.equal(query, rotate_and_write(**plain, **extra))
    for name in ("keys", "values"):
        assert int(plain[name].isfinite().sum()) == 9 * 2 * 16
        same(codes[name].float(), to_float8(plain[name]).float())
    if not norms:
        reference_rotate_and_write(**reference)
        same(codes["keys"].float(), reference["keys"].float())


def test_the_fused_write_and_its_reference_show_an_overflow() -> None:
    given = _heads(torch.float16)
    given["qkv"][0, -3:] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    codes, reference = (
        given | {name: given[name].to(FLOAT8).clone() for name in ("keys", "values")} | {"qkv": given["qkv"].clone()}
        for _ in range(2)
    )
    rotate_and_write(**codes)
    reference_rotate_and_write(**reference)
    written = [pages["values"].view(torch.uint8) for pages in (codes, reference)]
    place = given["write_pages"][0], 1, given["write_offsets"][0]
    assert written[0][place][-3:].tolist() == [0x7F, 0xFF, 0x7F]
    assert torch.equal(*written)


def test_pages_of_two_types_are_refused() -> None:
    given = _heads(torch.float32)
    with pytest.raises(AssertionError):
        rotate_and_write(**given | {"keys": given["keys"].to(FLOAT8)})


def _heads(dtype: torch.dtype) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    places = torch.randperm(28, generator=random)[:9]
    pool = torch.full((7, 2, 4, 16), torch.nan, dtype=dtype)
    return {
        "qkv": torch.randn(9, 8 * 16, generator=random).to(dtype) * 200,
        "cos": torch.randn(9, 16, generator=random).to(dtype),
        "sin": torch.randn(9, 16, generator=random).to(dtype),
        "write_pages": places // 4,
        "write_offsets": places % 4,
        "keys": pool.clone(),
        "values": pool.clone(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_device_with_an_instruction_for_it_reads_the_same_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, backend = Case(EXTENTS, 16, 4, 2, 16, dtype, float8=True), TritonAttention()
    expected = case.run(spec_for(case), backend)
    monkeypatch.setattr("sarathi_pp_kernels.triton.paged_attention._converts_float8", lambda device: True)
    assert torch.equal(case.run(spec_for(case), backend), expected)
