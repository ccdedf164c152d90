"""Checks of the numbers in config.json. transformers accepts impossible ones, which then fail while a layer computes.

They are refused here, before a model is loaded. transformers itself checks types (pretrained.py). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from sarathi_pp.errors import InputError

# Keys that must be above 0, also at any depth of the rotary settings. Other rope parameters may be 0.
_POSITIVE = (
    "attention_multiplier",
    "embedding_multiplier",
    "factor",
    "high_freq_factor",
    "logits_scaling",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "rope_theta",
    "rotary_pct",
)
_AT_MOST_1 = ("partial_rotary_factor", "rotary_pct")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")
# Other counts that layers with experts divide by or choose.
_OF_EXPERTS = (*_EXPERTS_PER_TOKEN, "decoder_sparse_step", "n_group", "topk_group")
# Endings of keys that may not be null, although the types of transformers' configurations allow it.
_NOT_NULL = (
    *("_eps", "_epsilon", "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"),
    *("n_group", "topk_group", "route_scale", "routed_scaling_factor", "moe_norm_min"),
)
# The rope parameters by which Ministral 3 and Mistral 4 scale queries.
_SCALED_QUERIES = ("ministral3", "mistral4")
_SCALING_ROPE = ("llama_4_scaling_beta", "original_max_position_embeddings")


def check_ranges(path: Path, values: Mapping[str, object]) -> None:
    """Raise InputError for the first number of config.json that is out of range, with its key, value and range.

    Args:
        path: path of config.json.
        values: the keys of config.json with their values.
    """
    has_experts = any(values.get(name) for name in _EXPERTS)
    for where, key, value in _numbers("", values):
        if key.endswith(("dropout", "pdrop", "layerdrop", "dropout_prob")):
            _require(0 <= value <= 1, path, where, value, "a number from 0 to 1")
        elif key in _AT_MOST_1:
            _require(0 < value <= 1, path, where, value, "above 0 and at most 1")
        elif key in _POSITIVE:
            _require(0 < value < math.inf, path, where, value, "above 0")
        elif key.endswith(("_eps", "_epsilon")):
            _require(0 <= value < math.inf, path, where, value, "at least 0")
        elif key in _OF_EXPERTS and has_experts:
            _require(value >= 1, path, where, value, "at least 1")
        elif key == "sliding_window" and values.get("use_sliding_window") is not False:
            _require(value >= 1, path, where, value, "at least 1")
    _check_null(path, values, has_experts=has_experts)
    _check_experts(path, values)


def _check_null(path: Path, values: Mapping[str, object], *, has_experts: bool) -> None:
    """Raise InputError if a number that a layer computes with is null or missing."""
    for key in values:
        if values[key] is None and (key.endswith(_NOT_NULL) or (key in _EXPERTS_PER_TOKEN and has_experts)):
            raise InputError(f"{path}: {key} is null; expected a number")
    rope = values.get("rope_parameters")
    if values.get("model_type") in _SCALED_QUERIES and isinstance(rope, Mapping):
        for key in _SCALING_ROPE:
            if not isinstance(rope.get(key), (int, float)):
                raise InputError(f"{path}: rope_parameters.{key} is {rope.get(key)!r:.100}; expected a number")
    _check_sections(path, rope)


def _check_sections(path: Path, rope: object) -> None:
    """Raise InputError if the sections of rotary channels (Qwen3.5) are not three counts."""
    if not isinstance(rope, Mapping) or "mrope_section" not in rope:
        return
    sections = rope["mrope_section"]
    if not isinstance(sections, list) or len(sections) != 3 or any(type(one) is not int or one < 0 for one in sections):
        raise InputError(
            f"{path}: rope_parameters.mrope_section is {sections!r:.100}; expected three integers of at least 0"
        )


def _check_experts(path: Path, values: Mapping[str, object]) -> None:
    for per_token, key in product(_EXPERTS_PER_TOKEN, _EXPERTS):
        chosen, experts = values.get(per_token), values.get(key)
        if isinstance(experts, int) and isinstance(chosen, int) and chosen > experts > 0:
            raise InputError(f"{path}: {per_token} is {chosen}; expected at most {key}, which is {experts}")
    if values.get("output_router_logits") and values.get("num_local_experts") == 0:
        raise InputError(f"{path}: output_router_logits is true, and num_local_experts is 0; expected false")
    groups, chosen = values.get("n_group"), values.get("topk_group")
    if isinstance(groups, int) and isinstance(chosen, int) and chosen > groups > 0:
        raise InputError(f"{path}: topk_group is {chosen}; expected at most n_group, which is {groups}")


def _numbers(where: str, values: Mapping[str, object]) -> Iterator[tuple[str, str, float]]:
    """Yield every number in config.json and in its rotary settings: its path, such as a.b.key, its key and its value.

    Args:
        where: path of `values` with a final dot; empty for config.json itself.
    """
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield where + key, key, value
        elif isinstance(value, Mapping) and (where or key.startswith("rope_")):  # rotary settings may be per layer type
            yield from _numbers(f"{where}{key}.", value)


def _require(legal: bool, path: Path, where: str, value: float, expected: str) -> None:
    if not legal:
        raise InputError(f"{path}: {where} is {value!r}; expected {expected}")
