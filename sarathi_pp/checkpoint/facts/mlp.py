"""The sizes of a layer's MLP, or of its experts, from config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.errors import InputError

# Keys of config.json for the width of a layer's MLP, or of one expert. The first key that exists counts.
_WIDTHS = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")
# Families whose MLP has two matrices, not three.
_UNGATED = frozenset(
    {
        *("apertus", "arcee", "biogpt", "gpt2", "gpt_neox"),
        *("jais2", "opt", "persimmon", "phi", "starcoder2"),
    }
)


@dataclass(frozen=True, slots=True)
class MLPShape:
    """The sizes of one layer's MLP. In a model with experts, those of a layer with experts.

    Attributes:
        width: number of channels between the matrices, per expert.
        matrices: number of weight matrices: 3 with a gate, 2 without.
        num_experts: number of experts of the layer; 1 in a model without experts.
        experts_per_token: number of experts that compute each token.
    """

    width: int
    matrices: int
    num_experts: int = 1
    experts_per_token: int = 1


def read_mlp(directory: Path, facts: ModelFacts) -> MLPShape:
    """Return the sizes of the MLP. Raise InputError for a size that is not a positive integer."""
    config = ConfigFile.read(directory)
    return MLPShape(
        width=_width(config, facts),
        matrices=2 if facts.model_type in _UNGATED else 3,
        num_experts=_first(config, _EXPERTS) or 1,
        experts_per_token=_first(config, _EXPERTS_PER_TOKEN) or 1,
    )


def _width(config: ConfigFile, facts: ModelFacts) -> int:
    """Return MLPShape.width."""
    if facts.model_type == "granitemoehybrid" and not config.values.get("num_local_experts", 1):
        return config.optional_size("shared_intermediate_size", None) or 1024
    width = _first(config, _WIDTHS) or 4 * facts.hidden_size
    if facts.model_type != "lfm2":
        return width
    width = config.optional_size("block_ff_dim", None) or width
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    factor, step = config.values.get("block_ffn_dim_multiplier", 1.0), config.optional_size("block_multiple_of", 256)
    if not isinstance(factor, int | float) or step is None:
        raise InputError(
            f"{config.path}: block_ffn_dim_multiplier is {factor!r:.100} and block_multiple_of is {step!r:.100}; "
            "expected numbers"
        )
    return -(-int(factor * (2 * width // 3)) // step) * step


def _first(config: ConfigFile, keys: tuple[str, ...]) -> int | None:
    """Return the value of the first key that exists; None if none does.

    Hunyuan's config.json has lists with a number per layer. The largest number then counts.
    """
    for key in keys:
        value = config.values.get(key)
        if value == 0:  # a hybrid Granite without experts
            continue
        if isinstance(value, list) and value and all(type(one) is int and one > 0 for one in value):
            return int(max(value))
        if size := config.optional_size(key, None):
            return size
    return None
