"""A description of a model's tensors that needs only its config.json, as if its weights were stored.

The model is created on torch's meta device, where tensors have a shape and no memory. That takes a second for 405
billion parameters. Names are those of the modules. Published files may store the parts of experts separately, but the
bytes per layer are the same.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers

from sarathi_pp.checkpoint.facts.pretrained import load_config, refuse_config
from sarathi_pp.checkpoint.files import ITEM_BYTES, Checkpoint, TensorEntry

# Names of float types in files.
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def describe_tensors(directory: Path, dtype: str) -> Checkpoint:
    """Return the tensors that a model with this config.json has. No weights are read.

    A tensor that two modules share is listed once, under its first name.

    Args:
        dtype: float type of the weights, by torch's name.

    Raises:
        InputError: transformers cannot create a model from this config.json.
    """
    family, config = load_config(directory)
    try:
        with torch.device("meta"):
            module = getattr(transformers, family.architecture)(config)
    except Exception as error:  # no weights are read, so config.json is the cause
        raise refuse_config(directory, error) from error
    stored = set(module.state_dict())
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: _entry(directory, tensor, dtype) for name, tensor in named if name in stored}
    return Checkpoint(tensors, {})


def _entry(directory: Path, tensor: torch.Tensor, dtype: str) -> TensorEntry:
    stored = _STORED[dtype] if tensor.is_floating_point() else "I64"
    shape = tuple(tensor.shape)
    return TensorEntry(directory / "config.json", stored, shape, 0, math.prod(shape) * ITEM_BYTES[stored])
