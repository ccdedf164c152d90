"""Memory for weights, which every microbatch reads completely, in pages of 2 MiB if Linux has some.

In pages of 4 KiB, the weights of a stage are some ten thousand pages. A core cannot keep the addresses of all of them.
So each one is looked up again while weights are read. These addresses also displace those of the program's own pages,
so the program between two microbatches is slower.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 2 << 20


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
