"""The likeliest allowed token of each row on CPU, by one pass over its logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Tokens that may be drawn, (words,): bit b of word w is token 32 * w + b. Bits above the vocabulary have no meaning.
Bits = NDArray[np.uint32]

# Results of rows without a token: a logit is NaN or infinite, or no token is allowed.
NOT_FINITE, NOTHING_ALLOWED = -1, -2


def has_pass(device: torch.device) -> bool:
    """Return whether `likeliest` runs on a device."""
    return device.type == "cpu" and _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    try:
        import sarathi_pp_kernels.cpu.largest  # noqa: F401 (numba is optional)
    except ImportError:  # not installed, or not for this numpy
        return False
    return True


def likeliest(
    logits: Tensor, rows: Sequence[int] | None = None, allowed: Sequence[Bits | None] | None = None
) -> list[int]:
    """Return the lowest id of the largest logit of each row, or NOT_FINITE or NOTHING_ALLOWED.

    Args:
        logits: (m, vocab) on CPU.
        rows: indexes of the n rows to read; None for all.
        allowed: the tokens that may be taken, for each of the n rows; None for all tokens.
    """
    from sarathi_pp_kernels.cpu import largest  # numba is optional

    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    logits = logits.contiguous()
    width = logits.shape[1]
    assert width, "there is nothing to draw from"
    kernel = largest.largest_bf16 if logits.dtype == torch.bfloat16 else largest.largest_float
    at = np.arange(len(logits)) if rows is None else np.array(rows, np.int64)
    addresses = logits.data_ptr() + at * (width * logits.itemsize)
    masks = np.zeros(len(at), np.int64)
    if allowed is not None:
        for row, bits in enumerate(allowed):
            if bits is not None:
                assert len(bits) * 32 >= width and bits.dtype == np.uint32 and bits.flags.c_contiguous
                masks[row] = bits.ctypes.data
    found = np.empty(len(at), np.int64)
    kernel(addresses.ctypes.data, masks.ctypes.data, found.ctypes.data, len(at), width)
    return found.tolist()
