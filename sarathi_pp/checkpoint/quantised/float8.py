"""Weights in FP8 that stay as they are stored: how they are read, and the memory that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.checkpoint.quantised.coded import CodedTensor
from sarathi_pp.checkpoint.quantised.tensor import product_scales
from sarathi_pp.checkpoint.tensor_file import DTYPES, read_box


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """Matrices of 8-bit floats, all of one shape, with the scales of their blocks.

        value (r, c)  =  code (r, c) * scale ((r + first row) // height, (c + first column) // width)

    Attributes:
        codes: (n, rows, columns) uint8, the bits of the floats.
        scales: (n, R, C), in the float type in which products are rounded.
        block: height and width of a block, whose values share a scale.
        first: row and column of the first block at which each matrix begins. It is (0, 0) for whole matrices.
        e5m2: the floats have 5 bits of exponent and 2 of mantissa, otherwise 4 and 3.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    first: tuple[int, int]
    e5m2: bool

    def to(self, device: torch.device) -> Float8Codes:
        return Float8Codes(self.codes.to(device), self.scales.to(device), self.block, self.first, self.e5m2)


class Float8Tensor(CodedTensor):
    """A weight in FP8 that stays as it is stored: (rows, columns), or a part of them."""

    def num_bytes(self) -> int:
        """Return the bytes of codes and scales in memory."""
        rows, columns = self._blocks()
        count = (rows[1] - rows[0]) * (columns[1] - columns[0])
        return math.prod(self.shape) + count * self._scale_dtype().itemsize

    @property
    def form(self) -> tuple[object, ...]:
        """All that must be equal for weights that are stacked."""
        rows, columns = self._ranges()
        (height, width), codes = self._entry.block, self._entry.codes.dtype
        return self.shape, self._entry.block, (rows[0] % height, columns[0] % width), codes, self._scale_dtype()

    def read_codes(self) -> Float8Codes:
        """Return the weight as it is stored, in host memory."""
        entry = self._entry
        rows, columns = self._ranges()
        codes = read_box(entry.codes, entry.shape[1], rows, columns, self._count)
        (top, bottom), (left, right) = self._blocks()
        scales = product_scales(entry, self._count)[top:bottom, left:right]
        height, width = entry.block
        return Float8Codes(
            codes.view(torch.uint8)[None],
            scales.contiguous()[None],
            entry.block,
            (rows[0] % height, columns[0] % width),
            entry.codes.dtype == "F8_E5M2",
        )

    def _ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and the columns of the weight, each [first, end). Linear layers are cut into one range."""
        shape = self._entry.shape
        if self._cut is None:
            return (0, shape[0]), (0, shape[1])
        (rows,), (columns,) = (self._cut.ranges_of(shape, dim) for dim in (0, 1))
        return rows, columns

    def _blocks(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and the columns of the scales that the weight needs, each [first, end)."""
        rows, columns = (
            (first // length, -(-end // length))
            for (first, end), length in zip(self._ranges(), self._entry.block, strict=True)
        )
        return rows, columns

    def _scale_dtype(self) -> torch.dtype:
        entry = self._entry
        stored = DTYPES[entry.scales.dtype]
        return torch.float32 if entry.float32_product or stored == torch.float8_e8m0fnu else stored
