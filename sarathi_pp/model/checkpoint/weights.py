"""The weights of one stage, found in a checkpoint by name. No byte of the others is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from sarathi_pp.model.checkpoint.files import TensorEntry
from sarathi_pp.model.checkpoint.quantised.parts import Entry
from sarathi_pp.model.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.model.checkpoint.stored_tensor import StoredTensor, TurnedTensor, Weight
from sarathi_pp.model.checkpoint.tensor_file import ReadCount
from sarathi_pp.model.families import Family


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
