"""A reader of the tensors of one stage, or of a shard's parts of them. It reads no byte of the others.

Each tensor is read into its own memory instead of being mapped. So the first microbatch causes no page faults, and a
file that is rewritten during a run cannot crash it. Loading takes little more memory than the stage's tensors. The
headers were checked when the checkpoint was opened, so a tensor is one seek and one read. A part of a tensor is one
seek and read per piece, a run of bytes without a gap. If a matrix is cut by columns, each row is a piece.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from threading import Lock
from types import EllipsisType

import torch
from torch import Tensor

from sarathi_pp.errors import InputError
from sarathi_pp.model.checkpoint.files import Checkpoint, TensorEntry
from sarathi_pp.model.checkpoint.surplus import needed_tensors
from sarathi_pp.model.families import Family

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


BLOCK_BYTES = 8 << 20


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


class StoredTensor:
    """A tensor that is still in its file. `[...]` reads it, into new memory each time.

    transformers' loader takes tensors in this form, and places them one at a time in a few threads. A tensor larger
    than BLOCK_BYTES is converted block by block while it is read, so that it is never held in both types. Smaller ones
    stay as stored, because transformers keeps some (gpt_oss's norms) in float32 whatever type is requested.

    Args:
        dtype: float type to which the loader will convert it.
        cut: the part to read; None for the whole tensor.
        device: device that the tensor moves to, whatever the loader requests; None for host memory.
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
        self.shape = entry.shape if cut is None else cut.of(entry.shape)

    def cut(self, cut: Cut) -> StoredTensor:
        """Return a part of the tensor. Only bytes of that part are read."""
        assert self._cut is None, "cut once"
        return StoredTensor(self._entry, self._count, self._dtype, cut, self._device)

    def num_stored_bytes(self) -> int:
        """Return the number of bytes to read from the file."""
        return math.prod(self.shape) * _DTYPES[self._entry.dtype].itemsize

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in memory, in the type to which the loader converts it."""
        stored = _DTYPES[self._entry.dtype]
        return math.prod(self.shape) * (self._dtype if stored.is_floating_point else stored).itemsize

    def __getitem__(self, everything: EllipsisType) -> Tensor | Arrived:
        """Return the whole tensor. Raise InputError if the file is shorter than before."""
        host = self.read()
        return host if self._device is None or self._device.type == "cpu" else Arrived(host, self._device)

    def read(self) -> Tensor:
        """Return the tensor in host memory."""
        stored = _DTYPES[self._entry.dtype]
        num_bytes = math.prod(self.shape) * stored.itemsize
        convert = stored.is_floating_point and stored != self._dtype and num_bytes > BLOCK_BYTES
        target = torch.empty(self.shape, dtype=self._dtype if convert else stored)
        with self._entry.file.open("rb", buffering=0) as stream:
            pieces = _Pieces(stream, self._entry, self._cut, stored.itemsize)
            if convert:
                flat, block = target.view(-1), BLOCK_BYTES // stored.itemsize
                scratch = torch.empty(block, dtype=stored)
                for start in range(0, flat.numel(), block):
                    part = scratch[: flat.numel() - start]
                    self._fill(part, pieces)
                    flat[start : start + block].copy_(part)
            elif num_bytes:
                self._fill(target.view(-1), pieces)
        return target

    def _fill(self, flat: Tensor, pieces: _Pieces) -> None:
        view = flat.view(torch.uint8).numpy().data
        pieces.fill(view)
        self._count.add(len(view))


class _Pieces:
    """The bytes of a stored tensor, or of a part of it, one piece after the other."""

    def __init__(self, stream: RawIOBase, entry: TensorEntry, cut: Cut | None, item_bytes: int) -> None:
        self._stream = stream
        self._file = entry.file
        if cut is None:
            self._piece_bytes = self._step_bytes = entry.num_bytes
            self._next = entry.begin
        else:
            self._piece_bytes = cut.piece(entry.shape) * item_bytes
            self._step_bytes = self._piece_bytes * cut.size
            self._next = entry.begin + self._piece_bytes * cut.index
        self._left = 0  # bytes of the current piece that are not read yet

    def fill(self, view: memoryview) -> None:
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


def stage_tensors(
    checkpoint: Checkpoint,
    family: Family,
    layers: tuple[int, int],
    num_layers: int,
    tied: bool,
    dtype: torch.dtype,
    count: ReadCount,
    device: torch.device | None = None,
) -> dict[str, StoredTensor]:
    """Return the stored tensors of the layers [first, end), and of the embedding or the LM head at either end.

    A name that belongs to no layer and to no module of the first stage goes to the last stage. So does a layer past the
    model's end. The loader of the last stage drops those that transformers ignores, and reports the others. The empty
    range at the model's end means the LM head alone.
    """
    first, end = layers
    in_layer = re.compile(rf"(?:^|\.){re.escape(family.layers)}\.(\d+)\.")
    before_lm_head = {family.norm, family.project_out} if first == end else set()
    chosen = {}
    for key, entry in needed_tensors(checkpoint).items():
        match = in_layer.search(key)
        if match is not None:
            layer = int(match[1])
            wanted = first <= layer < end or (first < end == num_layers <= layer)
        else:
            parts = key.split(".")
            wanted = end == num_layers and before_lm_head.isdisjoint(parts)
            if any(name in parts for name in family.first_modules):
                wanted = first == 0 or (end == num_layers and tied and family.embed in parts)
        if wanted:
            chosen[key] = StoredTensor(entry, count, dtype, device=device)
    return chosen
