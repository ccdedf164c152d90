"""Memory for what is read whole at every microbatch, in pages of 2 MiB where Linux has them to give.

Weights in pages of 4 KiB are some ten thousand pages a stage: more than a core keeps the places of, so that each one is
looked up again while weights are read, and what comes next, the program between two microbatches, has lost its own.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 2 << 20


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.empty on CPU. Only whole large pages are asked for, so that none is given out for a small rest."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room: torch says so in the way that is looked for
        return torch.empty(shape, dtype=dtype)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _LARGE
    with suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // _LARGE * _LARGE)
    return whole[first : first + num_bytes].view(dtype).view(shape)
