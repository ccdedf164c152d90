"""Stored tensors, or parts of them, read from a safetensors file. No byte of the others is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from threading import Lock

import torch
from torch import Tensor

from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.errors import InputError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Range = tuple[int, int]


class ReadCount:
    """Bytes of tensor data read so far, counted over threads. Its text is "3.1 of 35.8 GiB".

    Attributes:
        total_bytes: bytes to read in all; 0 until they are known.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.num_bytes = 0
        self.total_bytes = 0

    def __str__(self) -> str:
        if not self.total_bytes:
            return ""
        unit, size = ("GiB", 1 << 30) if self.total_bytes >= 1 << 30 else ("MiB", 1 << 20)
        return f"{self.num_bytes / size:.1f} of {self.total_bytes / size:.1f} {unit}"

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """One of `size` equal parts of a tensor, cut along one dimension.

    If the dimension consists of several blocks, as gate and up in one tensor, each block is cut:

        blocks 2, size 2, index 0:   gate gate . . up up . .

    Attributes:
        dim: index of the dimension that is cut.
        blocks: number of blocks of the dimension.
        index: index of the part, from 0.
        size: number of parts.
    """

    dim: int
    blocks: int
    index: int
    size: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, for a tensor of this shape."""
        assert shape[self.dim] % (self.blocks * self.size) == 0, f"{shape}, {self}"
        return (*shape[: self.dim], shape[self.dim] // self.size, *shape[self.dim + 1 :])

    def piece(self, shape: tuple[int, ...]) -> int:
        """Return the number of values in a piece of the part: those that are stored without a gap.

        The next piece starts `size` times this number of values after the start of a piece.
        """
        return shape[self.dim] // (self.blocks * self.size) * math.prod(shape[self.dim + 1 :])

    def ranges_of(self, shape: tuple[int, ...], dim: int) -> list[Range]:
        """Return the indices [first, end) of the part along a dimension, one range for each block of it."""
        if dim != self.dim:
            return [(0, shape[dim])]
        block = shape[dim] // self.blocks
        length = block // self.size
        firsts = (number * block + self.index * length for number in range(self.blocks))
        return [(first, first + length) for first in firsts]


class Pieces:
    """The bytes of a stored tensor, or of a part of it, one piece after the other.

    Args:
        begin: byte in the file at which the first piece starts.
        piece_bytes: length of a piece.
        step_bytes: distance of the starts of two pieces.
    """

    def __init__(
        self, stream: RawIOBase, entry: TensorEntry, begin: int, piece_bytes: int, step_bytes: int, count: ReadCount
    ) -> None:
        self._stream = stream
        self._file = entry.file
        self._piece_bytes = piece_bytes
        self._step_bytes = step_bytes
        self._next = begin
        self._count = count
        self._left = 0  # bytes of the current piece that are not read yet

    @classmethod
    def of_cut(cls, stream: RawIOBase, entry: TensorEntry, cut: Cut | None, count: ReadCount) -> Pieces:
        """Return the pieces of a part of a tensor; of the whole tensor if `cut` is None."""
        if cut is None:
            return cls(stream, entry, entry.begin, entry.num_bytes, entry.num_bytes, count)
        piece_bytes = cut.piece(entry.shape) * DTYPES[entry.dtype].itemsize
        begin = entry.begin + piece_bytes * cut.index
        return cls(stream, entry, begin, piece_bytes, piece_bytes * cut.size, count)

    def fill(self, flat: Tensor) -> None:
        """Fill a tensor of one dimension with the next bytes. Raise InputError if the file has become shorter."""
        view = flat.view(torch.uint8).numpy().data
        filled = 0
        while filled < len(view):
            if self._left == 0:
                self._stream.seek(self._next)
                self._next += self._step_bytes
                self._left = self._piece_bytes
            num_bytes = self._stream.readinto(view[filled : filled + self._left])
            if not num_bytes:
                raise InputError(f"{self._file}: ends inside a tensor; it was cut after loading began")
            filled += num_bytes
            self._left -= num_bytes
        self._count.add(len(view))


def read_box(entry: TensorEntry, width: int, rows: Range, columns: Range, count: ReadCount) -> Tensor:
    """Return the rows [first, end) and columns [first, end) of a stored tensor that is seen as a matrix.

    Args:
        width: number of items of a row of the matrix.
        count: counter to which the bytes are added.
    """
    (first, end), (left, right) = rows, columns
    dtype = DTYPES[entry.dtype]
    found = torch.empty((end - first, right - left), dtype=dtype)
    if not found.numel():
        return found
    row_bytes, piece_bytes = width * dtype.itemsize, (right - left) * dtype.itemsize
    if right - left == width:
        piece_bytes *= end - first
    with entry.file.open("rb", buffering=0) as stream:
        begin = entry.begin + first * row_bytes + left * dtype.itemsize
        Pieces(stream, entry, begin, piece_bytes, row_bytes, count).fill(found.view(-1))
    return found


class Arrived:
    """A tensor that was read, on its way to a device. transformers' loader calls only its `to`.

    The loader asks for every tensor in host memory, unless accelerate gives it another device. Then the whole stage
    would be in host memory before it moves to the device. So `to` ignores the requested device and moves the tensor to
    ours. Only a few tensors are in host memory at a time.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self._device = device

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._host.to(self._device, dtype)


def on_device(host: Tensor, device: torch.device | None) -> Tensor | Arrived:
    """Return a tensor for transformers' loader, which will be on this device; None for host memory."""
    return host if device is None or device.type == "cpu" else Arrived(host, device)
