"""Floats from the codes and scales of quantised weights. Every function works on a part of a weight.

    value = (code - zero) * scale

The product is computed in the type that the format's own library uses, so that the bits are the same:

    fp8                                 float32
    compressed-tensors, gptq and awq    the type of the scales
    mxfp4                               bfloat16, which holds it exactly
"""

from __future__ import annotations

import torch
from torch import Tensor

# Values of 4-bit floats with 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes that are packed into 32-bit words, from the lowest bits on.

    Args:
        words: (..., n) int32.
        bits: bits of a code: 4 or 8.

    Returns:
        (..., n * 32 / bits) uint8.
    """
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else _halves(packed)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of words that are packed along the rows: (n, columns) to (n * 32 / bits, columns)."""
    codes = unpack_words(words, bits).view(*words.shape, 32 // bits)
    return codes.transpose(1, 2).reshape(-1, words.shape[1])


def unpack_awq(words: Tensor) -> Tensor:
    """Return the unsigned codes of AWQ's words: (rows, n) int32 to (rows, 8 * n) uint8."""
    codes = unpack_words(words, 4).view(*words.shape, 2, 4)  # first the even columns of a word, then the odd ones
    return codes.transpose(2, 3).reshape(words.shape[0], -1)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the values of 4-bit floats, two per byte, the lower half first.

    Args:
        packed: (rows, n) uint8.

    Returns:
        (rows, 2 * n) bfloat16, which holds them exactly.
    """
    pairs = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)], dtype=torch.bfloat16)
    return pairs.view(torch.int32)[packed.int(), 0].view(torch.bfloat16)  # two values at a time


def e8m0(scales: Tensor) -> Tensor:
    """Return powers of 2 that are stored as their biased exponents: uint8 to bfloat16. 255 is NaN."""
    return scales.contiguous().view(torch.float8_e8m0fnu).bfloat16()


def scale_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Return (codes - zeros) * scales in the type of the scales.

    Args:
        codes: (r, c) values that the type of the scales holds exactly.
        scales: (R, C) float.
        zeros: (R, C) integers of at most 9 bits, or one for all values.
        rows: (r,) index of the row of scales for each row of codes; None if there is one for each, or one for all.
        columns: (c,) index of the column of scales for each column of codes; None as for rows.
    """
    values = codes.to(scales.dtype)
    if isinstance(zeros, Tensor):
        values -= _spread(zeros.to(scales.dtype), rows, columns)
    elif zeros:
        values -= zeros
    values *= _spread(scales, rows, columns)
    return values


def _spread(values: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return each value as often as it applies. One row or column is left to broadcasting."""
    if rows is not None and values.shape[0] > 1:
        values = values.index_select(0, rows)
    return values.index_select(1, columns) if columns is not None and values.shape[1] > 1 else values


def _halves(packed: Tensor) -> Tensor:
    """Return both halves of every byte, the lower one first: (..., n) uint8 to (..., 2 * n) uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
