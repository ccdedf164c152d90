"""Out-of-memory errors of torch, giving memory back, and byte counts as text."""

from __future__ import annotations

import gc
import logging

import torch

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out. torch has its own class for that only on devices."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def tells_of_memory(text: str) -> bool:
    """Return whether the text of an error, reported by code that caught it, says that memory ran out."""
    return "out of memory" in text or "can't allocate memory" in text


def give_back() -> None:
    """Give the unused memory of a GPU back to the driver.

    Other processes get memory from the driver, and the driver is also asked how much is free.
    """
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        # Before 2.12, after a failed capture torch believes that the graph is still being captured, from then on.
        _log.warning("torch cannot give its unused memory back: %s", str(error).splitlines()[0])


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
