"""The shape of every layer of a model, from config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.mlp import MLPShape, read_mlp
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.layer_shape import LayerShape
from sarathi_pp.model.shapes.feed_forward import FeedForward, feed_forwards
from sarathi_pp.model.shapes.mixer import mixer_kinds, mixer_shape


def read_layer_shapes(directory: Path, facts: ModelFacts) -> tuple[LayerShape, ...]:
    """Return the shape of every layer. Raise InputError for a size that is not a positive integer."""
    return layer_shapes(ConfigFile.read(directory), facts, read_mlp(directory, facts))


def layer_shapes(config: ConfigFile, facts: ModelFacts, mlp: MLPShape) -> tuple[LayerShape, ...]:
    """Return the shape of every layer.

    Layers of one kind are equal. If only some layers have experts, the names of the kinds show which ones.

    Args:
        mlp: see `feed_forwards`.
    """
    parts = feed_forwards(config, facts, mlp)
    kinds = mixer_kinds(facts)
    shapes = {kind: mixer_shape(kind, config, facts) for kind in set(kinds)}
    endings = _endings(parts)
    return tuple(
        replace(
            shapes[kind],
            kind=kind + endings[part],
            weights=shapes[kind].weights + part.weights,
            token_weights=shapes[kind].token_weights + part.token_weights,
        )
        for kind, part in zip(kinds, parts, strict=True)
    )


def _endings(parts: Sequence[FeedForward]) -> dict[FeedForward, str]:
    """Return what each feed-forward part adds to the name of the layer's kind."""
    if len(set(parts)) == 1:
        return dict.fromkeys(parts, "")
    return {part: " with experts" if part.weights > part.token_weights else " with an MLP" for part in parts}
