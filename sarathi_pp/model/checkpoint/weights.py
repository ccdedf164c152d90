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
from types import EllipsisType

import torch
from torch import Tensor

from sarathi_pp.model.checkpoint.files import TensorEntry
from sarathi_pp.model.checkpoint.quantised.parts import Entry
from sarathi_pp.model.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.model.checkpoint.tensor_file import DTYPES, Arrived, Cut, Pieces, ReadCount, on_device
from sarathi_pp.model.checkpoint.turned_tensor import TurnedTensor
from sarathi_pp.model.families import Family

BLOCK_BYTES = 8 << 20


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
        return math.prod(self.shape) * DTYPES[self._entry.dtype].itemsize

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in memory, in the type to which the loader converts it."""
        stored = DTYPES[self._entry.dtype]
        return math.prod(self.shape) * (self._dtype if stored.is_floating_point else stored).itemsize

    def __getitem__(self, everything: EllipsisType) -> Tensor | Arrived:
        """Return the whole tensor. Raise InputError if the file is shorter than before."""
        return on_device(self.read(), self._device)

    def read(self) -> Tensor:
        """Return the tensor in host memory."""
        stored = DTYPES[self._entry.dtype]
        num_bytes = math.prod(self.shape) * stored.itemsize
        convert = stored.is_floating_point and stored != self._dtype and num_bytes > BLOCK_BYTES
        target = torch.empty(self.shape, dtype=self._dtype if convert else stored)
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


Weight = StoredTensor | QuantisedTensor | TurnedTensor
"""A weight that is still in its file."""


def stage_tensors(
    entries: Mapping[str, Entry],
    family: Family,
    layers: tuple[int, int],
    num_layers: int,
    tied: bool,
    dtype: torch.dtype,
    count: ReadCount,
    device: torch.device | None = None,
) -> dict[str, Weight]:
    """Return the weights of the layers [first, end), and of the embedding or the LM head at either end.

    A name that belongs to no layer and to no module of the first stage goes to the last stage. So does a layer past the
    model's end. The loader of the last stage drops those that transformers ignores, and reports the others. The empty
    range at the model's end means the LM head alone.
    """
    first, end = layers
    in_layer = re.compile(rf"(?:^|\.){re.escape(family.layers)}\.(\d+)\.")
    before_lm_head = {family.norm, family.project_out} if first == end else set()
    chosen: dict[str, Weight] = {}
    for key, entry in entries.items():
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
            chosen[key] = _weight(entry, count, dtype, device)
    return chosen


def _weight(entry: Entry, count: ReadCount, dtype: torch.dtype, device: torch.device | None) -> Weight:
    if not isinstance(entry, TensorEntry):
        return QuantisedTensor(entry, count, dtype, device=device)
    if entry.turned:
        return TurnedTensor(entry, count, dtype, device=device)
    return StoredTensor(entry, count, dtype, device=device)
