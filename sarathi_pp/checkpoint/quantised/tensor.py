"""A quantised weight that is still in its file. Reading it gives floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.checkpoint.quantised.parts import Layout, QuantisedEntry
from sarathi_pp.checkpoint.quantised.unpack import (
    e8m0,
    scale_codes,
    unpack_awq,
    unpack_e2m1,
    unpack_rows,
    unpack_words,
)
from sarathi_pp.checkpoint.stored_tensor import Weight
from sarathi_pp.checkpoint.tensor_file import Range, ReadCount, read_box
from sarathi_pp.errors import InputError

# Values that are unpacked at a time. The threads of transformers' loader unpack several weights at once.
_BLOCK_VALUES = 1 << 17
_WORD_BITS = 32


class QuantisedTensor(Weight):
    """A quantised weight. Reading it returns floats. Only a block of the codes is in memory at a time."""

    _entry: QuantisedEntry

    def num_stored_bytes(self) -> int:
        codes, *others = self._entry.parts
        share = math.prod(self.shape) / max(1, math.prod(self._entry.shape))
        return round(codes.num_bytes * share) + sum(part.num_bytes for part in others)

    def read(self) -> Tensor:
        """Return the weight in host memory, in its dtype."""
        entry = self._entry
        _require_stated_shape(entry, self._count)
        _require_symmetric(entry, self._count)
        shape, last = entry.shape, len(entry.shape) - 1
        ranges, columns = [(0, shape[last - 1])], (0, shape[last])
        if self._cut is not None:
            ranges, (columns,) = (self._cut.ranges_of(shape, dim) for dim in (last - 1, last))
        target = torch.empty(self.shape, dtype=self.dtype)
        for index, part in enumerate(target.view(-1, *self.shape[-2:])):
            above = 0  # rows of the part that are filled
            for rows in ranges:
                matrix = _Matrix(entry, index, rows, columns, self._count)
                for (top, bottom), (left, right), values in _BLOCKS[entry.layout](matrix):
                    first = above - rows[0]
                    part[first + top : first + bottom, left - columns[0] : right - columns[0]] = values
                above += rows[1] - rows[0]
        return target


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The part of one matrix that is read. A weight of several experts has one matrix for each.

    Attributes:
        index: index of the matrix in the weight.
        rows: rows of the matrix that are read, [first, end).
        columns: columns of the matrix that are read, [first, end).
    """

    entry: QuantisedEntry
    index: int
    rows: Range
    columns: Range
    count: ReadCount

    @property
    def shape(self) -> tuple[int, int]:
        return self.entry.shape[-2], self.entry.shape[-1]

    def codes(self, height: int, width: int, rows: Range, columns: Range) -> Tensor:
        """Return a part of the codes, which are stored as matrices of this height and width."""
        above = self.index * height
        return read_box(self.entry.codes, width, (above + rows[0], above + rows[1]), columns, self.count)

    def scales(self) -> Tensor:
        """Return the scales of this matrix in the type of the product."""
        scales = self._small(self.entry.scales)
        if scales.dtype == torch.float8_e8m0fnu or self.entry.float32_product:
            return scales.float()
        return scales

    def zeros(self) -> Tensor | None:
        """Return the zero points of this matrix as they are stored; None if there are none."""
        return None if self.entry.zeros is None else self._small(self.entry.zeros)

    def groups(self, columns: Range) -> Tensor:
        """Return the index of the group of scales for each of these inputs."""
        if self.entry.order is not None:
            order = self._small(self.entry.order)[0].long()
            count = self.entry.scales.shape[0 if self.entry.layout == "gptq" else -1]
            if order.min() < 0 or order.max() >= count or (count > 1 and not order.any()):
                raise InputError(
                    f"{self.entry.order.file}: the group indices of {self.entry.name} are {int(order.min())} to "
                    f"{int(order.max())}; expected indices of {count} groups\n  try  another checkpoint of this model"
                )
            return order[columns[0] : columns[1]]
        return torch.arange(*columns) // self.entry.block[1]

    def _small(self, entry: TensorEntry) -> Tensor:
        """Return a whole part of this matrix, as a matrix. A vector becomes a column for scales, a row for order."""
        shape = entry.shape or (1,)
        if entry is self.entry.order:
            shape = (1, *shape)
        elif len(shape) == 1:
            shape = (*shape, 1)
        height, width = shape[-2:]
        above = self.index * height if len(shape) > 2 else 0
        return read_box(entry, width, (above, above + height), (0, width), self.count)


def product_scales(entry: QuantisedEntry, count: ReadCount) -> Tensor:
    """Return the scales of a weight that is one matrix, in the float type in which products are rounded."""
    rows, columns = entry.shape
    return _Matrix(entry, 0, (0, rows), (0, columns), count).scales()


# Rows and columns of the weight, and their values.
_Block = tuple[Range, Range, Tensor]


def _steps(whole: Range, length: int, multiple: int = 1) -> Iterator[Range]:
    """Yield ranges of about this length, which begin at the range's start or at multiples of `multiple`."""
    first, end = whole
    while first < end:
        following = min(end, max(first + multiple, first + length) // multiple * multiple)
        yield first, following
        first = following


def _plain(matrix: _Matrix) -> Iterator[_Block]:
    """One code per element, in rows of outputs."""
    height, width = matrix.shape
    scales, zeros, groups = matrix.scales(), matrix.zeros(), matrix.groups(matrix.columns)
    for rows in _steps(matrix.rows, _BLOCK_VALUES // max(1, width)):
        codes = matrix.codes(height, width, rows, matrix.columns)
        owners = torch.arange(*rows) // matrix.entry.block[0]
        yield rows, matrix.columns, scale_codes(codes, scales, 0 if zeros is None else zeros, owners, groups)


def _turned(matrix: _Matrix) -> Iterator[_Block]:
    """One code per element, in rows of inputs. Scales are stored alike."""
    height, width = matrix.shape
    scales, zeros = matrix.scales(), matrix.zeros()
    owners = torch.arange(*matrix.rows) // matrix.entry.block[0]
    for columns in _steps(matrix.columns, _BLOCK_VALUES // max(1, height)):
        codes = matrix.codes(width, height, columns, matrix.rows)
        groups = matrix.groups(columns)
        yield matrix.rows, columns, scale_codes(codes, scales, 0 if zeros is None else zeros, groups, owners).T


def _packed(matrix: _Matrix) -> Iterator[_Block]:
    """Words of codes in rows of outputs. Words of zero points are packed along the outputs."""
    (height, width), bits = matrix.shape, matrix.entry.bits
    per_word, middle = _WORD_BITS // bits, 1 << (bits - 1)
    left, right = matrix.columns
    words = left // per_word, -(-right // per_word)
    scales, zeros, groups = matrix.scales(), matrix.zeros(), matrix.groups(matrix.columns)
    if zeros is not None:
        zeros = unpack_rows(zeros, bits)
    for rows in _steps(matrix.rows, _BLOCK_VALUES // max(1, width)):
        codes = unpack_words(matrix.codes(height, width // per_word, rows, words), bits)
        codes = codes[:, left - words[0] * per_word :][:, : right - left]
        owners = torch.arange(*rows) // matrix.entry.block[0]
        yield rows, matrix.columns, scale_codes(codes, scales, middle if zeros is None else zeros, owners, groups)


def _gptq(matrix: _Matrix) -> Iterator[_Block]:
    """Words of codes along the inputs. Words of zero points are packed along the outputs, and hold one less."""
    (height, width), bits = matrix.shape, matrix.entry.bits
    per_word, most = _WORD_BITS // bits, (1 << bits) - 1
    outputs = slice(*matrix.rows)
    scales = matrix.scales()[:, outputs]
    stored = matrix.zeros()
    assert stored is not None
    zeros = ((unpack_words(stored, bits).int() + 1) & most)[:, outputs]
    for columns in _steps(matrix.columns, _BLOCK_VALUES // max(1, height), per_word):
        words = columns[0] // per_word, -(-columns[1] // per_word)
        codes = unpack_rows(matrix.codes(width // per_word, height, words, matrix.rows), bits)
        codes = codes[columns[0] - words[0] * per_word :][: columns[1] - columns[0]]
        yield matrix.rows, columns, scale_codes(codes, scales, zeros, matrix.groups(columns)).T


def _awq(matrix: _Matrix) -> Iterator[_Block]:
    """Words of codes and of zero points along the outputs, in an order of their own."""
    height, width = matrix.shape
    per_word = _WORD_BITS // matrix.entry.bits
    top, bottom = matrix.rows
    words = top // per_word, -(-bottom // per_word)
    outputs = slice(top - words[0] * per_word, bottom - words[0] * per_word)
    scales = matrix.scales()[:, top:bottom]
    stored = matrix.zeros()
    assert stored is not None
    zeros = unpack_awq(stored)[:, top:bottom]
    for columns in _steps(matrix.columns, _BLOCK_VALUES // max(1, height)):
        codes = unpack_awq(matrix.codes(width, height // per_word, columns, words))[:, outputs]
        yield matrix.rows, columns, scale_codes(codes, scales, zeros, matrix.groups(columns)).T


def _mxfp4(matrix: _Matrix) -> Iterator[_Block]:
    """Two 4-bit floats per byte, in rows of outputs. The weight is (inputs, outputs)."""
    inputs, outputs = matrix.shape
    assert matrix.rows == (0, inputs), "inputs are read whole"
    scales = e8m0(matrix.scales())
    groups = matrix.groups((0, inputs))
    for rows in _steps(matrix.columns, _BLOCK_VALUES // max(1, inputs)):
        values = unpack_e2m1(matrix.codes(outputs, inputs // 2, rows, (0, inputs // 2)))
        yield matrix.rows, rows, scale_codes(values, scales[rows[0] : rows[1]], 0, None, groups).T


_BLOCKS: Mapping[Layout, Callable[[_Matrix], Iterator[_Block]]] = {
    "plain": _plain,
    "turned": _turned,
    "packed": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _require_symmetric(entry: QuantisedEntry, count: ReadCount) -> None:
    """Raise InputError if codes have zero points other than 0 although config.json says that they are symmetric."""
    if entry.symmetric_zeros is None:
        return
    length = math.prod(entry.symmetric_zeros.shape)
    if read_box(entry.symmetric_zeros, length, (0, 1), (0, length), count).any():
        raise InputError(
            f"{entry.symmetric_zeros.file}: zero points of {entry.name} are not all 0, but config.json says that its "
            f"codes are symmetric\n  try  another checkpoint of this model"
        )


def _require_stated_shape(entry: QuantisedEntry, count: ReadCount) -> None:
    """Raise InputError if the shape that is stored with a weight is not its shape."""
    if entry.stated is None:
        return
    width = math.prod(entry.stated.shape)
    stated = read_box(entry.stated, width, (0, 1), (0, width), count)[0].tolist()
    if tuple(stated) != entry.shape:
        shape = entry.name.replace("_packed", "_shape")
        raise InputError(
            f"{entry.stated.file}: {shape} is {stated}; expected {list(entry.shape)}, the shape of its codes\n  try  "
            "download config.json and the weights again"
        )
