"""The weights of one stage, found in a checkpoint by name. No byte of the others is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sarathi_pp.checkpoint.entries import stays_coded
from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.checkpoint.quantised.float8 import Float8Tensor
from sarathi_pp.checkpoint.quantised.mxfp4 import Mxfp4Tensor
from sarathi_pp.checkpoint.quantised.parts import Entry
from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.stored_tensor import StoredTensor, TurnedTensor, Weight
from sarathi_pp.checkpoint.tensor_file import DTYPES, ReadCount
from sarathi_pp.model.fuse.float_linear import NARROW, has_float_gemm


@dataclass(frozen=True, slots=True)
class HeldTypes:
    """The float types in which a stage holds its weights.

    Attributes:
        compute: type of activations, and of weights that are not held as they are stored.
        dequantised: type to which quantised weights are dequantised.
        as_stored: matrices of a narrower type stay as they are stored, and are widened in registers.
        coded: weights in FP8 and MXFP4 stay as they are stored. Products of more than 16 rows expand them to `compute`.
    """

    compute: torch.dtype
    dequantised: torch.dtype
    as_stored: bool
    coded: bool = False

    @classmethod
    def on(
        cls, device: str, compute: torch.dtype, dequantised: torch.dtype | None = None, *, coded: bool = False
    ) -> HeldTypes:
        """Return the types for a kind of device, "cpu" or "cuda".

        Args:
            dequantised: None if quantised weights become those of `compute`.
            coded: weights in FP8 and MXFP4 stay as they are stored.
        """
        as_stored = device == "cpu" and compute == torch.float32 and has_float_gemm()
        return cls(compute, dequantised or compute, as_stored, coded)

    def of(self, entry: Entry) -> torch.dtype:
        """Return the type in which a weight is held.

        Vectors are small, and are converted. So are matrices with an odd number of inputs, because products read pairs.
        """
        if not self.as_stored or len(entry.shape) < 2 or entry.shape[-1] % 2:
            return self.compute
        stored = DTYPES[entry.dtype] if isinstance(entry, TensorEntry) else self.dequantised
        return stored if stored in NARROW else self.compute


def stage_tensors(
    entries: Mapping[str, Entry],
    family: Family,
    layers: tuple[int, int],
    num_layers: int,
    tied: bool,
    held: HeldTypes,
    count: ReadCount,
    device: torch.device | None = None,
) -> dict[str, Weight]:
    """Return the weights of the layers [first, end), and of the embedding or the LM head at either end.

    A name that belongs to no layer and to no module of the first stage goes to the last stage. So does a layer past the
    model's end. The loader of the last stage drops those that transformers ignores, and reports the others. The empty
    range at the model's end means the LM head alone.

    Args:
        held: the types in which the weights are held in memory.
        count: counter to which the bytes are added while they are read.
        device: see Weight.
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
            # Few modules of learned positions are plain embeddings, which could hold a narrower type.
            of_positions = family.positions is not None and family.positions in key.split(".")
            dtype = held.compute if of_positions else held.of(entry)
            coded = held.coded and stays_coded(key, entry)
            chosen[key] = _weight(entry, count, dtype, device, coded=coded)
    return chosen


def _weight(entry: Entry, count: ReadCount, dtype: torch.dtype, device: torch.device | None, *, coded: bool) -> Weight:
    if not isinstance(entry, TensorEntry):
        if coded:
            kind = Mxfp4Tensor if entry.layout == "mxfp4" else Float8Tensor
            return kind(entry, count, dtype, device=device)
        return QuantisedTensor(entry, count, dtype, device=device)
    if entry.turned:
        return TurnedTensor(entry, count, dtype, device=device)
    return StoredTensor(entry, count, dtype, device=device)
