"""Memory for weights, which every microbatch reads completely, in pages of 2 MiB if Linux has some.

In pages of 4 KiB, the weights of a stage are some ten thousand pages. A core cannot keep the addresses of all of them.
So each one is looked up again while weights are read. These addresses also displace those of the program's own pages,
so the program between two microbatches is slower.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_LARGE = 2 << 20


def release(tensor: Tensor) -> None:
    """Give the memory of a tensor back to Linux. Its values are lost, and nothing may read it any more.

    The rest of its storage stays. Memory that the tensor shares a page of 4 KiB with stays too.

    Args:
        tensor: on CPU, without gaps between its values.
    """
    page, libc = mmap.PAGESIZE, _libc()
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // page * page
    if end > begin and libc is not None:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@functools.cache
def _libc() -> Any:
    """Return the C library of this process; None if it has no madvise."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(mmap, "MADV_DONTNEED") and hasattr(libc, "madvise") else None


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is not initialised, as torch.empty on CPU does, in large pages if possible.

    Large pages are requested only for the part that fills them. A small remainder would waste most of one.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room: torch raises the error that callers look for
        return torch.empty(shape, dtype=dtype)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _LARGE
    with suppress(OSError):  # a Linux without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // _LARGE * _LARGE)
    return whole[first : first + num_bytes].view(dtype).view(shape)
