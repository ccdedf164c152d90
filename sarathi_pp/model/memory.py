"""Out-of-memory errors of torch, giving memory back, and byte counts as text."""

from __future__ import annotations

import gc
import logging

import torch

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    torch has its own error class for that on GPUs only. On CPU it raises a RuntimeError with a certain text.
    """
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def tells_of_memory(text: str) -> bool:
    """Return whether an error's text says that memory ran out. It serves for errors that are logged, not raised."""
    return "out of memory" in text or "can't allocate memory" in text


def give_back() -> None:
    """Give GPU memory that torch keeps but does not use back to the driver.

    Only then can other processes have it, and only then does the driver count it as free.
    """
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        # If capturing a CUDA graph has failed, torch before 2.12 believes from then on that it still captures.
        _log.warning("torch cannot give its unused memory back: %s", str(error).splitlines()[0])


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
