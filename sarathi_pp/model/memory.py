"""What torch says where there is no memory, and how numbers of bytes are said."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for it on devices only."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
