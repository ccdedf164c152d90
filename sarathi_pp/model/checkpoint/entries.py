"""The weights that a causal language model computes with, found in a checkpoint by name. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sarathi_pp.model.checkpoint.config_file import ConfigFile
from sarathi_pp.model.checkpoint.files import ITEM_BYTES, Checkpoint, TensorEntry
from sarathi_pp.model.checkpoint.quantised.parts import Entry, join_parts
from sarathi_pp.model.checkpoint.quantised.scheme import read_scheme
from sarathi_pp.model.checkpoint.surplus import draft_layers, needed_tensors
from sarathi_pp.model.checkpoint.wrapper import text_checkpoint


def weight_entries(config: ConfigFile, checkpoint: Checkpoint) -> Mapping[str, Entry]:
    """Return the weights by the names that unquantised ones have.

    Raises:
        InputError: parts of a quantised weight are missing, left over or of the wrong shape.
        InputError: a tensor of a multimodal model is of no known part.
        UnsupportedModelError: the weights are quantised in a form that is not read.
    """
    if config.wrapper is not None:
        checkpoint, _ = text_checkpoint(checkpoint, config.values, config.wrapper)
    tensors, scheme = needed_tensors(checkpoint, draft_layers(config.values)), read_scheme(config)
    return tensors if scheme is None else join_parts(tensors, scheme, checkpoint.aliases)


def stored_bytes(entry: Entry) -> int:
    """Return the bytes that a weight takes in its files."""
    return entry.num_bytes if isinstance(entry, TensorEntry) else sum(part.num_bytes for part in entry.parts)


def loaded_bytes(entry: Entry, dtype: str) -> int:
    """Return the bytes that a weight takes in memory.

    Args:
        dtype: the float type of the run, by torch's name.
    """
    return math.prod(entry.shape) * ITEM_BYTES[_STORED_NAMES[dtype]]


_STORED_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
