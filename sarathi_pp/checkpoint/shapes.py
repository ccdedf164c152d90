"""A description of a model's tensors that needs only its config.json, as if its weights were stored.

The model is created on torch's meta device, where tensors have a shape and no memory. That takes a second for 405
billion parameters. Names are those of the modules. Published files may store the parts of experts separately, but the
bytes per layer are the same. Experts in MXFP4 have the tensors of their codes and scales. Which weights are quantised
in other forms does not follow from config.json, so all others are floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.pretrained import load_config, refuse_config
from sarathi_pp.checkpoint.files import ITEM_BYTES, Checkpoint, TensorEntry
from sarathi_pp.checkpoint.quantised.scheme import read_scheme

# Names of the experts' weights that are stored in MXFP4.
_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
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
    scheme = read_scheme(ConfigFile.read(directory))
    if scheme is not None and scheme.method == "mxfp4":
        tensors = dict(_mxfp4_parts(tensors))
    return Checkpoint(tensors, {})


def _mxfp4_parts(tensors: dict[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors with codes and scales instead of the experts' weights (experts, inputs, outputs)."""
    for name, entry in tensors.items():
        if _EXPERTS.search(name) is None or len(entry.shape) != 3 or entry.shape[1] % 32:
            yield name, entry
            continue
        experts, inputs, outputs = entry.shape
        count = experts * outputs * inputs // 32
        yield f"{name}_blocks", TensorEntry(entry.file, "U8", (experts, outputs, inputs // 32, 16), 0, 16 * count)
        yield f"{name}_scales", TensorEntry(entry.file, "U8", (experts, outputs, inputs // 32), 0, count)


def _entry(directory: Path, tensor: torch.Tensor, dtype: str) -> TensorEntry:
    stored = _STORED[dtype] if tensor.is_floating_point() else "I64"
    shape = tuple(tensor.shape)
    return TensorEntry(directory / "config.json", stored, shape, 0, math.prod(shape) * ITEM_BYTES[stored])
