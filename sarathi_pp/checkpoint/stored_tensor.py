"""Weights that are still in their files, as transformers' loader takes them.

Each tensor is read into its own memory instead of being mapped. So the first microbatch causes no page faults, and a
file that is rewritten during a run cannot crash it. Loading takes little more memory than the stage's tensors. The
headers were checked when the checkpoint was opened, so a tensor is one seek and one read. A part of a tensor is one
seek and read per piece, a run of bytes without a gap. If a matrix is cut by columns, each row is a piece.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import EllipsisType
from typing import Self

import torch
from torch import Tensor

from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.checkpoint.quantised.parts import Entry
from sarathi_pp.checkpoint.tensor_file import DTYPES, Arrived, Cut, Pieces, ReadCount, on_device, read_box

BLOCK_BYTES = 8 << 20


class Weight(ABC):
    """A weight that is still in its file, or a part of it. `[...]` reads it, into new memory each time.

    transformers' loader takes tensors in this form, and places them one at a time in a few threads.

    Args:
        entry: the position of the whole weight in its file.
        count: counter to which the bytes are added while they are read.
        dtype: float type in which it is held in memory, to which the loader converts it.
        cut: the part to read; None for the whole weight.
        device: device that the weight moves to, whatever the loader requests; None for host memory.
    """

    def __init__(
        self,
        entry: Entry,
        count: ReadCount,
        dtype: torch.dtype,
        cut: Cut | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._entry = entry
        self._count = count
        self.dtype = dtype
        self._cut = cut
        self._device = device
        self.shape = self._whole if cut is None else cut.of(self._whole)

    @property
    def _whole(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return self._entry.shape

    def cut(self, cut: Cut) -> Self:
        """Return a part of the weight. Only bytes of that part are read."""
        assert self._cut is None, "cut once"
        return type(self)(self._entry, self._count, self.dtype, cut, self._device)

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in memory, in the type to which the loader converts it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, everything: EllipsisType) -> Tensor | Arrived:
        """Return the weight. Raise InputError if its parts do not agree, or the file is shorter than before."""
        return on_device(self.read(), self._device)

    @abstractmethod
    def num_stored_bytes(self) -> int:
        """Return the number of bytes to read from the file."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the weight in host memory."""


class StoredTensor(Weight):
    """A weight that is one stored tensor.

    A tensor larger than BLOCK_BYTES is converted block by block while it is read, so that it is never held in both
    types. Smaller ones stay as stored, because transformers keeps some (gpt_oss's norms) in float32 whatever type is
    requested.
    """

    _entry: TensorEntry

    def num_stored_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self._entry.dtype].itemsize

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in memory. Only floats are converted."""
        return super().num_bytes() if DTYPES[self._entry.dtype].is_floating_point else self.num_stored_bytes()

    def read(self) -> Tensor:
        stored = DTYPES[self._entry.dtype]
        num_bytes = self.num_stored_bytes()
        convert = stored.is_floating_point and stored != self.dtype and num_bytes > BLOCK_BYTES
        target = torch.empty(self.shape, dtype=self.dtype if convert else stored)
        with self._entry.file.open("rb", buffering=0) as stream:
            pieces = Pieces.of_cut(stream, self._entry, self._cut, self._count)
            if convert:
                flat, block = target.view(-1), BLOCK_BYTES // stored.itemsize
                scratch = torch.empty(block, dtype=stored)
                for start in range(0, flat.numel(), block):
                    part = scratch[: flat.numel() - start]
                    pieces.fill(part)
                    flat[start : start + block].copy_(part)
            elif num_bytes:
                pieces.fill(target.view(-1))
        return target


class TurnedTensor(StoredTensor):
    """A weight (experts, outputs, inputs) that is stored as (experts, inputs, outputs).

    One matrix is turned at a time, so that the weight is never held twice.
    """

    @property
    def _whole(self) -> tuple[int, ...]:
        experts, inputs, outputs = self._entry.shape
        return experts, outputs, inputs

    def read(self) -> Tensor:
        """Return the weight in host memory, in its dtype."""
        _, outputs, inputs = self._whole
        rows, columns = (
            [(0, self._whole[dim])] if self._cut is None else self._cut.ranges_of(self._whole, dim) for dim in (1, 2)
        )
        ((left, right),) = columns
        target = torch.empty(self.shape, dtype=self.dtype)
        for index, matrix in enumerate(target):
            filled = 0
            for first, end in rows:
                stored = index * inputs + left, index * inputs + right
                box = read_box(self._entry, outputs, stored, (first, end), self._count)
                matrix[filled : filled + end - first] = box.T
                filled += end - first
        return target
