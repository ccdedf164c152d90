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

from sarathi_pp.model.checkpoint.files import ITEM_BYTES, Checkpoint, TensorEntry
from sarathi_pp.model.checkpoint.pretrained import load_config, refuse_config


def describe_tensors(directory: Path) -> Checkpoint:
    """Return the tensors that a model with this config.json has. No weights are read.

    A tensor that two modules share is listed once, under its first name.

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
    tensors = {name: _entry(directory, tensor) for name, tensor in named if name in stored}
    return Checkpoint(tensors, {})


def _entry(directory: Path, tensor: torch.Tensor) -> TensorEntry:
    """Describe one tensor. Any float type counts as F32, since loading converts them all to the dtype of the run."""
    dtype = "F32" if tensor.is_floating_point() else "I64"
    shape = tuple(tensor.shape)
    return TensorEntry(directory / "config.json", dtype, shape, 0, math.prod(shape) * ITEM_BYTES[dtype])
