"""Replacement of the layers of a loaded stage that keep a state. Without it, they could not find a sequence's state.

A module is recognised by its code, as in fuse/rewrite.py. Linear layers and norms stay, and are fused and packed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from sarathi_pp.checkpoint.facts.state_caches import STATE_LAYERS
from sarathi_pp.errors import UnsupportedModelError
from sarathi_pp.model.fuse.rewrite import runs
from sarathi_pp.model.missing_layer import MissingLayer
from sarathi_pp.model.state.choice import Backends
from sarathi_pp.model.state.gated_delta_net import GatedDeltaNet
from sarathi_pp.model.state.mamba import Mamba
from sarathi_pp.model.state.short_convolution import ShortConvolution

# Modules of transformers with code that is known, and what replaces them. Some families share the code of another.
_KNOWN: tuple[tuple[str, str, Callable[[Any, Backends, torch.dtype], nn.Module]], ...] = (
    ("qwen3_next", "Qwen3NextGatedDeltaNet", GatedDeltaNet),
    ("qwen3_5", "Qwen3_5GatedDeltaNet", GatedDeltaNet),
    ("granitemoehybrid", "GraniteMoeHybridMambaLayer", Mamba),
    ("lfm2", "Lfm2ShortConv", ShortConvolution),
)


def use_states(directory: Path, config: Any, layers: nn.ModuleList, dtype: torch.dtype, backends: Backends) -> None:
    """Replace the modules that keep a state. Call it before other rewrites, when the weights are on their device.

    Args:
        directory: directory of the model, for errors.
        config: transformers' config object.
        layers: all layers of the model. Those of other stages are missing.
        dtype: float type of the computation.

    Raises:
        UnsupportedModelError: transformers computes such a layer with code that is not known.
    """
    for index, (kind, layer) in enumerate(zip(getattr(config, "layer_types", None) or (), layers, strict=False)):
        if kind not in STATE_LAYERS or isinstance(layer, MissingLayer):
            continue
        found = [(name, make) for name, child in layer.named_children() for make in _replacement(child)]
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{directory}: layer {index} is {kind!r}, and transformers {transformers.__version__} computes it with "
                "code that is not known here; install a version of transformers that sarathi-pp's metadata names"
            )
        name, make = found[0]
        setattr(layer, name, make(getattr(layer, name), backends, dtype))


def _replacement(module: nn.Module) -> Iterator[Callable[[Any, Backends, torch.dtype], nn.Module]]:
    """Yield the class that replaces a module, if its code is known."""
    for family, name, make in _KNOWN:
        known = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name, None)
        if known is not None and runs(module, known):
            yield make
            return
