"""The class of a model that has only one stage's modules.

The architecture's own `...ForCausalLM` class is subclassed at run time. Its constructor runs on the meta device, where
tensors take no memory. Then a MissingLayer replaces every module that the stage does not own:

    stage [0, 2)   embed  layer0  layer1  -       -       -       -     -
    stage [2, 5)   -      -       -       layer2  layer3  layer4  norm  LM head
    LM head alone  -      -       -       -       -       -       -     LM head

So layers keep their index in the whole model, and everything that depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.facts.pretrained import refuse_config
from sarathi_pp.model.missing_layer import MissingLayer
from sarathi_pp.model.tensor_parallel import Split

# Found in a pattern that names the layer with one index.
_NAMES_LAYER = re.compile(r"layers\\\.\d")


def partial_class(
    directory: Path,
    architecture: Any,
    family: Family,
    layers: tuple[int, int],
    num_layers: int,
    tied: bool,
    split: Split | None,
    holds: Sequence[Callable[[nn.Module], None]],
) -> Any:
    """Return a subclass of the architecture that holds only the stage's modules, or a shard's part of them.

    Args:
        holds: called with the stage's modules, which are still without memory. They change how weights are held.
    """
    first, end = layers
    embeds, ends, alone = first == 0, end == num_layers, first == end

    def construct(self: Any, config: Any) -> None:
        try:
            architecture.__init__(self, config)
        except Exception as error:  # no weights are read yet, so config.json is the cause
            raise refuse_config(directory, error) from error
        _report_layers(self)
        base = self.get_submodule(family.base)
        blocks = getattr(base, family.layers)
        for index in (*range(first), *range(end, num_layers)):
            blocks[index] = MissingLayer()
        if split is not None:
            split.narrow(blocks)
        if not embeds:
            _drop_embedding(base, family, keep_tied=ends and tied)
        if not ends or alone:
            _drop_end(self, base, family, keep_lm_head=alone)
        if alone:
            setattr(base, family.layers, nn.ModuleList())
        for hold in holds:
            hold(self)

    # Name and module are those of the parent, because transformers looks up weight conversions by them.
    namespace: dict[str, Any] = {
        "__init__": construct,
        "__module__": architecture.__module__,
        "__qualname__": architecture.__qualname__,
    }
    if not (ends and tied):
        namespace["_tied_weights_keys"] = {}
    return type(architecture.__name__, (architecture,), namespace)


def _report_layers(model: Any) -> None:
    """Let transformers report stored layers that the model does not have.

    For some families it ignores a layer with a certain index, because a published model has a layer for multi-token
    prediction (MTP) there. config.json says if it is one, see `draft_layers` in checkpoint/surplus.py.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {name for name in ignored if not _NAMES_LAYER.search(name)}


def drop_tied_embedding(base: Any, family: Family) -> None:
    """Drop the embedding of a stage that does not embed, after the weights are loaded.

    A tied LM head then has its weight alone. It needs the embedding only while transformers loads the two together.
    """
    setattr(base, family.embed, MissingLayer())


def _drop_end(model: Any, base: Any, family: Family, *, keep_lm_head: bool) -> None:
    """Drop the modules that turn activations into logits, or all of them except the LM head."""
    setattr(base, family.norm, MissingLayer())
    if family.project_out is not None:
        setattr(base, family.project_out, None)
    if not keep_lm_head:
        setattr(model, family.lm_head, MissingLayer())


def _drop_embedding(base: Any, family: Family, *, keep_tied: bool) -> None:
    """Drop the modules that turn token ids into activations. A tied LM head is loaded as the embedding's weight."""
    if not keep_tied:
        setattr(base, family.embed, MissingLayer())
    if family.positions is not None:
        setattr(base, family.positions, _NoPositions())
    if family.project_in is not None:
        setattr(base, family.project_in, None)
    for path in family.once:
        owner, _, name = path.rpartition(".")
        holder = attrgetter(owner)(base) if owner else base
        assert hasattr(holder, name), f"{family.architecture} no longer has {path}"
        setattr(holder, name, False if isinstance(getattr(holder, name), bool) else 1.0)


class _NoPositions(nn.Module):
    """A module that replaces learned positions on a stage that does not embed. It returns 0, which changes nothing."""

    def forward(self, like: Tensor, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros((), device=like.device)
