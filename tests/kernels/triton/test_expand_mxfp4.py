"""Expanded weights in MXFP4 have the bits of their plain reference, and of the loader that dequantises them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sarathi_pp_kernels.triton.expand_mxfp4 import expand_mxfp4, reference_expand_mxfp4
from torch import Tensor

from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.checkpoint.quantised.mxfp4 import Mxfp4Tensor
from sarathi_pp.checkpoint.quantised.parts import QuantisedEntry
from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.tensor_file import ReadCount
from tests.kernels.triton.bounds import checked_addresses
from tests.kernels.triton.test_expand import BITS, expect_same_bits

# numpy warns of NaN and infinity in the interpreter. Some scales mean these.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Matrices, outputs and groups of inputs: tiles that are full, and tiles that are not.
SHAPES = [(1, 64, 4), (2, 65, 5), (3, 1, 1), (1, 130, 9), (2, 200, 70)]


def random_parts(count: int, outputs: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of all kinds, with the smallest and the largest scales and NaN among them."""
    generator = torch.Generator().manual_seed(count + outputs + groups)
    codes, scales = (
        torch.randint(0, 256, (count, outputs, width), dtype=torch.uint8, generator=generator)
        for width in (groups * 16, groups)
    )
    edges = torch.tensor([0, 1, 2, 126, 127, 128, 252, 253, 254, 255], dtype=torch.uint8)
    scales.view(-1)[: len(edges)] = edges[: scales.numel()]
    return codes, scales


def stored(directory: Path, codes: Tensor, scales: Tensor) -> QuantisedEntry:
    """Write codes and scales to a file, and return their entry."""
    count, outputs, groups = scales.shape
    file = directory / "parts"
    file.write_bytes(codes.numpy().tobytes() + scales.numpy().tobytes())
    blocks = TensorEntry(file, "U8", (count, outputs, groups, 16), 0, codes.nbytes)
    powers = replace(blocks, shape=tuple(scales.shape), begin=codes.nbytes, num_bytes=scales.nbytes)
    shape = (count, groups * 32, outputs)
    return QuantisedEntry(
        name="blocks", layout="mxfp4", shape=shape, bits=4, codes=blocks, scales=powers, block=(1, 32)
    )


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_expanded_bits_are_those_of_the_loader(shape: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    entry = stored(tmp_path, *random_parts(*shape))
    kept, plain = (kind(entry, ReadCount(), dtype) for kind in (Mxfp4Tensor, QuantisedTensor))
    assert isinstance(kept, Mxfp4Tensor)
    parts = [kept.read_codes(index) for index in range(shape[0])]
    codes, scales = (torch.cat([getattr(one, name) for one in parts]) for name in ("codes", "scales"))
    assert kept.num_bytes() == codes.nbytes + scales.nbytes
    found, expected = (torch.full(kept.shape, 5.0, dtype=dtype) for _ in range(2))
    with checked_addresses():
        expand_mxfp4(codes, scales, found)
    reference_expand_mxfp4(codes, scales, expected)
    expect_same_bits(found, plain.read())
    expect_same_bits(expected, plain.read())


def test_every_code_and_scale() -> None:
    """Each scale is that of one output, whose inputs have all codes."""
    codes = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)] * 2, dtype=torch.uint8)
    codes = codes.expand(1, 256, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    found, expected = torch.zeros(1, 32, 256), torch.zeros(1, 32, 256)
    expand_mxfp4(codes, scales, found)
    reference_expand_mxfp4(codes, scales, expected)
    expect_same_bits(found, expected)
    assert found[0, :8, 127].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert found[0, 8:16, 127].tolist() == [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert found[0, :, 255].isnan().all() and found[0, 1, 0] == 2.0**-128


def test_only_the_experts_that_are_needed_are_written() -> None:
    codes, scales = random_parts(5, 70, 6)
    needed = torch.tensor([0, 1, 0, 0, 7], dtype=torch.int32)
    found, expected = (torch.full((5, 192, 70), 5.0, dtype=torch.bfloat16) for _ in range(2))
    with checked_addresses():
        expand_mxfp4(codes, scales, found, needed)
    reference_expand_mxfp4(codes, scales, expected, needed)
    expect_same_bits(found, expected)
    assert (found[[0, 2, 3]] == 5.0).all() and (found[[1, 4]] == 5.0).float().mean() < 0.01


def test_wrong_shapes_are_refused() -> None:
    codes, scales = random_parts(1, 8, 2)
    target = torch.zeros(1, 64, 8)
    for given in (
        (codes[..., :-1].contiguous(), scales, target),
        (codes, scales[..., :1].contiguous(), target),
        (codes, scales, torch.zeros(1, 8, 64)),
        (codes, scales, torch.zeros(1, 8, 64).mT),
        (codes, scales, target, torch.ones(2, dtype=torch.int32)),
    ):
        with pytest.raises(AssertionError):
            expand_mxfp4(*given)
