"""The weights that a causal language model computes with, found in a checkpoint by name. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.wrapper import text_checkpoint
from sarathi_pp.checkpoint.files import ITEM_BYTES, Checkpoint, TensorEntry
from sarathi_pp.checkpoint.quantised.parts import FLOAT8, Entry, join_parts
from sarathi_pp.checkpoint.quantised.scheme import read_scheme
from sarathi_pp.checkpoint.surplus import draft_layers, needed_tensors

# Modules of a layer whose linear layers read their weight in a product, and in nothing else.
_MODULES = ("self_attn", "mlp", "feed_forward", "block_sparse_moe")
# The projection of latents is absorbed into queries and outputs when it is loaded.
_ABSORBED = "kv_b_proj"
_OF_EXPERTS = re.compile(r"\.\d+\.mlp\.experts\.[^.]+$")
_IN_LAYER = re.compile(r"\.\d+\.(?P<module>[^.]+)\.(?:.+\.)?(?P<name>[^.]+)\.weight$")


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


def stays_coded(key: str, entry: Entry) -> bool:
    """Return whether a weight can stay as codes and scales: one of a linear layer or of experts, in FP8 or MXFP4.

    Others are dequantised, such as those that latent attention absorbs.

    Args:
        key: name of the weight.
    """
    if not isinstance(entry, TensorEntry) and entry.layout == "mxfp4":
        return _OF_EXPERTS.search(key) is not None
    found = _IN_LAYER.search(key)
    if isinstance(entry, TensorEntry) or found is None or found["module"] not in _MODULES:
        return False
    is_float8 = entry.layout == "plain" and entry.codes.dtype in FLOAT8 and entry.zeros is None
    return is_float8 and len(entry.shape) == 2 and found["name"] != _ABSORBED


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
