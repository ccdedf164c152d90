"""Memory that is like torch's own, for which the operating system is asked for large pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from sarathi_pp_kernels.cpu.huge_pages import empty_in_large_pages

LARGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")


def asked_for(address: int) -> bool:
    """Return True if the mapping that holds an address is marked for large pages."""
    begin = end = 0
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(bound, 16) for bound in found.groups())
        elif line.startswith("VmFlags:") and begin <= address < end:
            return " hg" in line
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("shape", [(3,), (700, 1024), (5, 1 << 18, 4), (0, 7), (1 << 21,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_it_holds_what_is_put_there(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = empty_in_large_pages(shape, dtype)
    assert (made.shape, made.dtype, made.device.type) == (shape, dtype, "cpu") and made.is_contiguous()
    expected = torch.arange(made.numel(), dtype=torch.int64).view(shape).to(dtype)
    made.copy_(expected)
    assert torch.equal(made, expected)


@pytest.mark.skipif(not SETTING.exists() or not SMAPS.exists(), reason="needs Linux with large pages built in")
def test_whole_large_pages_are_asked_for_and_the_rest_is_not() -> None:
    made = empty_in_large_pages((2 * LARGE + LARGE // 2,), torch.uint8)
    assert made.data_ptr() % LARGE == 0
    assert asked_for(made.data_ptr()) and asked_for(made.data_ptr() + 2 * LARGE - 1)
    assert not asked_for(made.data_ptr() + 2 * LARGE)


def test_what_is_small_is_torchs_own() -> None:
    with mock.patch.object(mmap, "mmap", side_effect=AssertionError):
        assert empty_in_large_pages((LARGE - 1,), torch.uint8).numel() == LARGE - 1


def test_where_there_is_no_room_torch_says_so() -> None:
    """The text is torch's own, which a stage recognises as lack of memory."""
    with pytest.raises(RuntimeError, match="allocate memory"):
        empty_in_large_pages((1 << 56,), torch.uint8)


def test_a_kernel_without_them_gives_small_ones() -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *asked: int) -> None:
            raise OSError(22, "Invalid argument")

    with mock.patch.object(mmap, "mmap", Refusing):
        made = empty_in_large_pages((LARGE,), torch.uint8)
    assert made.fill_(7).eq(7).all()


def test_memory_goes_back_with_the_tensor() -> None:
    def mapped() -> int:
        return int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]

    before = mapped()
    made = empty_in_large_pages((256 * LARGE,), torch.uint8)
    part = made[LARGE : 2 * LARGE]
    assert mapped() - before >= 256 * LARGE
    del made
    assert mapped() - before >= 256 * LARGE, "a part of it is still held"
    del part
    assert mapped() - before < 16 * LARGE
