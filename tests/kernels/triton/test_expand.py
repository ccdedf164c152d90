"""Expanded weights have the bits of their plain reference, and of the loader that dequantises them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from sarathi_pp_kernels.triton.expand import expand, reference_expand
from torch import Tensor

from sarathi_pp.checkpoint.entries import stays_coded, weight_entries
from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.files import TensorEntry, open_checkpoint
from sarathi_pp.checkpoint.quantised.float8 import Float8Tensor
from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.tensor_file import Cut, ReadCount
from tests import thinning
from tests.checkpoint.quantised import write_published
from tests.kernels.triton.bounds import checked_addresses

# numpy warns of NaN and infinity in the interpreter. Some codes mean these.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
FORMS = ("fp8 blocks", "fp8 tensor", "float8 channels", "float8 tensor", "float8 blocks")


def expect_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
    bits = BITS[found.dtype]
    assert torch.equal(found.nan_to_num(nan=0.0).view(bits), expected.nan_to_num(nan=0.0).view(bits))


def random_scales(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return scales between about 1e-4 and 1, with all bits of their mantissas."""
    return (10 ** (-4 * torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))))).to(dtype)


def random_codes(*shape: int) -> Tensor:
    """Return codes of every kind: all 256 come several times if there are enough."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


# Rows and columns of a matrix, of a block, and of the first block at which the matrix begins.
SHAPES = [
    ((128, 256), (128, 128), (0, 0)),
    ((130, 300), (128, 128), (0, 0)),
    ((7, 48), (1, 48), (0, 0)),
    ((33, 1100), (33, 1100), (0, 0)),
    ((40, 100), (32, 16), (31, 5)),
    ((20, 600), (64, 700), (40, 90)),
    ((3, 20), (2, 3), (1, 2)),
]


def cases() -> Iterator[ParameterSet]:
    """Yield all shapes with all types of scales and targets; by default, each shape with three of the nine pairs."""
    for place, shape in enumerate(SHAPES):
        for number, (scale_dtype, target_dtype) in enumerate(product(BITS, BITS)):
            # Each type of scales and of targets is in one of the three.
            default = (number // 3 + number) % 3 == place % 3
            yield pytest.param(*shape, scale_dtype, target_dtype, marks=[] if default else [pytest.mark.full])


@pytest.mark.parametrize(("shape", "block", "first", "scale_dtype", "target_dtype"), list(cases()))
def test_values_have_the_bits_of_the_reference(
    shape: tuple[int, int],
    block: tuple[int, int],
    first: tuple[int, int],
    scale_dtype: torch.dtype,
    target_dtype: torch.dtype,
) -> None:
    codes = random_codes(1, *shape)
    blocks = (-(-(start + size) // length) for start, size, length in zip(first, shape, block, strict=True))
    scales = random_scales(1, *blocks, dtype=scale_dtype)
    for e5m2 in (False, True):
        found, expected = (torch.zeros(codes.shape, dtype=target_dtype) for _ in range(2))
        with checked_addresses():
            expand(codes, scales, found, block, first, e5m2=e5m2)
        reference_expand(codes, scales, expected, block, first, e5m2=e5m2)
        expect_same_bits(found, expected)


def test_every_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    for e5m2, dtype in ((False, torch.float8_e4m3fn), (True, torch.float8_e5m2)):
        found = torch.zeros(1, 1, 256)
        expand(codes, torch.ones(1, 1, 1), found, (1, 256), e5m2=e5m2)
        expect_same_bits(found, codes.view(dtype).float())


def test_only_the_experts_that_are_needed_are_written() -> None:
    """They are written into rows of a larger weight, and nothing else is touched."""
    count, rows, columns = 5, 40, 700
    codes, scales = random_codes(count, rows, columns), random_scales(count, 2, 6, dtype=torch.float32)
    needed = torch.tensor([0, 1, 0, 0, 7], dtype=torch.int32)
    both = torch.full((count, 2 * rows, columns), 5.0, dtype=torch.bfloat16)
    expected = both.clone()
    with checked_addresses():
        expand(codes, scales, both[:, rows:], (32, 128), needed=needed)
    reference_expand(codes, scales, expected[:, rows:], (32, 128), needed=needed)
    expect_same_bits(both, expected)
    assert torch.equal(both[:, :rows], torch.full_like(both[:, :rows], 5.0))
    assert (both[[0, 2, 3], rows:] == 5.0).all() and (both[[1, 4], rows:] == 5.0).float().mean() < 0.01


def test_wrong_shapes_are_refused() -> None:
    codes, target = random_codes(1, 8, 16), torch.zeros(1, 8, 16)
    for scales, block, first in (
        (torch.ones(1, 2, 1), (8, 16), (0, 0)),
        (torch.ones(1, 1, 1), (8, 16), (8, 0)),
        (torch.ones(1, 1, 2).expand(1, 2, 2), (4, 8), (0, 0)),
    ):
        with pytest.raises(AssertionError):
            expand(codes, scales, target, block, first)
    with pytest.raises(AssertionError):
        expand(codes, torch.ones(1, 1, 1), torch.zeros(1, 16, 8), (8, 16))


@pytest.mark.parametrize("form", FORMS)
def test_expanded_bits_are_those_of_the_loader(form: str, tmp_path: Path) -> None:
    """Whole weights, and halves along both dimensions, whose borders are inside blocks. Layers are alike."""
    found = write_published("llama", form, tmp_path).quantised
    tried = 0
    for key, entry in weight_entries(ConfigFile.read(found), open_checkpoint(found)).items():
        if isinstance(entry, TensorEntry) or not stays_coded(key, entry):
            continue
        if not thinning.full and re.search(r"layers\.[2-9]", key):
            continue
        tried += 1
        for cut in (None, *(Cut(dim, 1, half, 2) for dim in (0, 1) for half in (0, 1))):
            for dtype in (torch.bfloat16, torch.float16):
                kept, plain = (kind(entry, ReadCount(), dtype, cut) for kind in (Float8Tensor, QuantisedTensor))
                held, target = kept.read_codes(), torch.zeros((1, *kept.shape), dtype=dtype)
                expand(held.codes, held.scales, target, held.block, held.first, e5m2=held.e5m2)
                expect_same_bits(target[0], plain.read())
                assert kept.num_bytes() == held.codes.nbytes + held.scales.nbytes
    assert tried > 10


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """They are stored as their exponents, as in DeepSeek-V3.1."""
    found = write_published("llama", "fp8 blocks", tmp_path).quantised
    entries = weight_entries(ConfigFile.read(found), open_checkpoint(found))
    entry = entries["model.layers.0.mlp.up_proj.weight"]
    assert not isinstance(entry, TensorEntry)
    as_exponents = replace(entry.scales, dtype="F8_E8M0", num_bytes=entry.scales.num_bytes // 4)
    entry = replace(entry, scales=as_exponents, float32_product=True)
    held = Float8Tensor(entry, ReadCount(), torch.bfloat16).read_codes()
    target = torch.zeros(held.codes.shape, dtype=torch.bfloat16)
    expand(held.codes, held.scales, target, held.block, held.first)
    expect_same_bits(target[0], QuantisedTensor(entry, ReadCount(), torch.bfloat16).read())
