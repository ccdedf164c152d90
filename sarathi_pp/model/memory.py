"""What torch says where there is no memory, how it gives some back, and how numbers of bytes are said."""

from __future__ import annotations

import gc
import logging

import torch

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for it on devices only."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def tells_of_memory(text: str) -> bool:
    """The same of a report by somebody who has caught the error."""
    return "out of memory" in text or "can't allocate memory" in text


def give_back() -> None:
    """What a GPU's memory holds that nobody uses any more, to the driver: others and whoever counts it ask that one."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        # Before 2.12 torch takes a graph whose capture has failed for one that is being captured, from then on.
        _log.warning("torch keeps the memory that it does not use: %s", str(error).splitlines()[0])


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
