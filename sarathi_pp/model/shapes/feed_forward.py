"""The sizes of each layer's feed-forward part, an MLP or experts, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.mlp import MLPShape
from sarathi_pp.checkpoint.facts.support import ModelFacts

_DENSE_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
# Number of shared experts, each as wide as a routed one.
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
# Number of layers at the start that have an MLP, not experts.
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The weights of one layer's MLP or experts.

    Attributes:
        weights: all of them, with the router.
        token_weights: those that one token is multiplied with.
    """

    weights: int
    token_weights: int


def feed_forwards(config: ConfigFile, facts: ModelFacts, mlp: MLPShape) -> list[FeedForward]:
    """Return the feed-forward part of each layer.

    Args:
        mlp: sizes of a layer with experts, or of every layer if the model has no experts.
    """
    matrix = mlp.matrices * facts.hidden_size
    if mlp.num_experts == 1:
        return [FeedForward(matrix * mlp.width, matrix * mlp.width)] * facts.num_layers
    width = _first(config, _DENSE_WIDTHS) or mlp.width
    dense = FeedForward(matrix * width, matrix * width)
    shared = matrix * _shared_width(config, facts, mlp) + facts.hidden_size * mlp.num_experts  # and the router
    if "shared_expert_intermediate_size" in config.values:
        shared += facts.hidden_size  # the gate of the shared expert
    expert = matrix * mlp.width
    experts = FeedForward(shared + mlp.num_experts * expert, shared + mlp.experts_per_token * expert)
    return [experts if _has_experts(config, layer) else dense for layer in range(facts.num_layers)]


def _has_experts(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer of a model with experts has them. The keys are those of several families."""
    types = config.values.get("mlp_layer_types")
    if isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "sparse")
    only_dense = config.values.get("mlp_only_layers")
    if isinstance(only_dense, list) and layer in only_dense:
        return False
    step = _first(config, ("decoder_sparse_step",)) or 1
    interval = _first(config, ("moe_layer_interval",)) or 1
    return layer >= _first(config, _FIRST_DENSE) and (layer + 1) % step == 0 and (layer + 1) % interval == 0


def _shared_width(config: ConfigFile, facts: ModelFacts, mlp: MLPShape) -> int:
    """Return the channels of the experts that compute every token."""
    if facts.model_type == "hunyuan_v1_moe":
        return _first(config, _DENSE_WIDTHS)
    return _first(config, _SHARED_WIDTHS) or _first(config, _SHARED) * mlp.width


def _first(config: ConfigFile, keys: tuple[str, ...]) -> int:
    """Return the value of the first key that has a number of at least 1; 0 if none has."""
    numbers = (config.values.get(key) for key in keys)
    return next((number for number in numbers if type(number) is int and number > 0), 0)
