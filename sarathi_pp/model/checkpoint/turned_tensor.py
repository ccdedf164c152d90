"""A weight that is stored as the transpose of what the model computes with, still in its file."""

from __future__ import annotations

import math
from types import EllipsisType

import torch
from torch import Tensor

from sarathi_pp.model.checkpoint.files import TensorEntry
from sarathi_pp.model.checkpoint.tensor_file import DTYPES, Arrived, Cut, ReadCount, on_device, read_box


class TurnedTensor:
    """A weight (experts, outputs, inputs) that is stored as (experts, inputs, outputs).

    One matrix is turned at a time, so that the weight is never held twice. See StoredTensor for the arguments.
    """

    def __init__(
        self,
        entry: TensorEntry,
        count: ReadCount,
        dtype: torch.dtype,
        cut: Cut | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._entry = entry
        self._count = count
        self._dtype = dtype
        self._cut = cut
        self._device = device
        experts, inputs, outputs = entry.shape
        self._whole = experts, outputs, inputs
        self.shape = self._whole if cut is None else cut.of(self._whole)

    def cut(self, cut: Cut) -> TurnedTensor:
        """Return a part of the weight. Only bytes of that part are read."""
        assert self._cut is None, "cut once"
        return TurnedTensor(self._entry, self._count, self._dtype, cut, self._device)

    def num_stored_bytes(self) -> int:
        """Return the number of bytes to read from the file."""
        return math.prod(self.shape) * DTYPES[self._entry.dtype].itemsize

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in memory."""
        return math.prod(self.shape) * self._dtype.itemsize

    def __getitem__(self, everything: EllipsisType) -> Tensor | Arrived:
        """Return the whole weight. Raise InputError if the file is shorter than before."""
        return on_device(self.read(), self._device)

    def read(self) -> Tensor:
        """Return the weight in host memory, in the dtype of the run."""
        _, outputs, inputs = self._whole
        rows, columns = (
            [(0, self._whole[dim])] if self._cut is None else self._cut.ranges_of(self._whole, dim) for dim in (1, 2)
        )
        ((left, right),) = columns
        target = torch.empty(self.shape, dtype=self._dtype)
        for index, matrix in enumerate(target):
            filled = 0
            for first, end in rows:
                stored = index * inputs + left, index * inputs + right
                box = read_box(self._entry, outputs, stored, (first, end), self._count)
                matrix[filled : filled + end - first] = box.T
                filled += end - first
        return target
