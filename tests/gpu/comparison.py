"""A comparison of compiled kernels with their references on the same device: errors, rows, and races.

Numbers are new in each run. If a comparison fails, its message has the seed, and TESTS_GPU_SEED repeats it. With
TESTS_GPU_TINY sizes are small, for a simulated GPU whose kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Found and expected tensors, by what they are.
Pairs = dict[str, tuple[Tensor, Tensor]]

TINY = bool(os.environ.get("TESTS_GPU_TINY"))
DEVICE = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "fp16", F32: "fp32"}
# The interpreter rounds to bfloat16 in a way of its own.
DTYPES = [F32] if TINY else [BF16, F32]
# A row alone may differ by more: its own norm is small if it averages over many values.
_ROW_FACTOR = 8
# Bytes of memory that is poisoned before a case: one large block, which the allocator divides, and small ones, which it
# takes from elsewhere.
_LARGE, _SMALL, _NUM_SMALL = (1 << 12, 1 << 10, 4) if TINY else (1 << 30, 1 << 19, 64)


def sized(full: list[T], tiny: list[T]) -> list[T]:
    """Return the cases for a GPU, or those for a simulated one."""
    return tiny if TINY else full


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@torch.inference_mode()
def compare(case: Callable[[], Pairs], limit: float, *, repeatable: bool = True) -> None:
    """Run a case twice, and compare its tensors with the expected ones and with those of the other run.

    Args:
        case: makes new input and returns found and expected tensors.
        limit: most norm of the difference over the norm of the expected tensor. 0 for integers.
        repeatable: both runs must give the same bits. Whole stages need not, because a library may sum in any order.
    """
    seed = int(os.environ.get("TESTS_GPU_SEED") or secrets.randbelow(1 << 31))
    first, again = (_run(case, seed) for _ in range(2))
    for name, (found, expected) in first.items():
        error, row_error = _distance(found, expected, f"{name}, seed {seed}")
        assert error <= limit, f"{name}: the error is {error:.2e}, at most {limit:.0e} is right; seed {seed}"
        most = _ROW_FACTOR * limit
        assert row_error <= most, f"{name}: a row's error is {row_error:.2e}, at most {most:.0e} is right; seed {seed}"
        if repeatable:
            assert _has_bits_of(found, again[name][0]), f"{name}: two runs differ, so there is a race; seed {seed}"


def _run(case: Callable[[], Pairs], seed: int) -> Pairs:
    torch.manual_seed(seed)
    _poison()
    pairs = case()
    torch.cuda.synchronize(DEVICE)
    return pairs


def _poison() -> None:
    """Fill free memory with bytes of 255: NaN in every float type, -1 in integers. No old results stay there."""
    torch.cuda.empty_cache()
    sizes = [_LARGE, *[_SMALL] * _NUM_SMALL]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in sizes]
    del blocks


def _distance(found: Tensor, expected: Tensor, name: str) -> tuple[float, float]:
    """Return the relative error of the tensor and that of its worst row. Both are infinite if integers differ."""
    assert found.shape == expected.shape, f"{name}: the shape is {found.shape}, not {expected.shape}"
    if not found.dtype.is_floating_point:
        return (0.0, 0.0) if torch.equal(found.cpu(), expected.cpu()) else (float("inf"), float("inf"))
    ours, theirs = found.double(), expected.double()
    unwritten = theirs.isnan()
    wrong = int((ours.isnan() != unwritten).sum())
    assert not wrong, f"{name}: {wrong} numbers are NaN on one side only"
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    difference = (ours - theirs).reshape(-1, ours.shape[-1]).norm(dim=-1)
    size = theirs.reshape(-1, theirs.shape[-1]).norm(dim=-1)
    rows = difference / size.clamp_min(1e-30)
    worst = float(rows[size > 0].max()) if bool((size > 0).any()) else 0.0
    return float(difference.norm() / size.norm().clamp_min(1e-30)), worst


def _has_bits_of(one: Tensor, other: Tensor) -> bool:
    a, b = (tensor.contiguous().view(-1).view(torch.uint8).cpu() for tensor in (one, other))
    return torch.equal(a, b)
