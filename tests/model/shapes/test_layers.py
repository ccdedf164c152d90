"""The shapes of layers, compared with the weights of transformers' modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from transformers import PretrainedConfig

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.support import describe_config
from sarathi_pp.errors import InputError
from sarathi_pp.layer_shape import LayerShape, count_kinds
from sarathi_pp.model.shapes.layers import read_layer_shapes
from tests.model.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **SIZES, **DELTA_NET, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[1]
    ),
    "qwen3_5_text": lambda: t.Qwen3_5TextConfig(**SIZES, **DELTA_NET),
    "qwen3_5_moe_text": lambda: t.Qwen3_5MoeTextConfig(
        **SIZES, **DELTA_NET, **EXPERTS, shared_expert_intermediate_size=24
    ),
    "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        mamba_n_heads=6,
        mamba_d_state=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "granitemoehybrid_dense": lambda: t.GraniteMoeHybridConfig(
        **SIZES, num_local_experts=0, shared_intermediate_size=40, mamba_n_heads=6, mamba_d_state=16
    ),
    "lfm2": lambda: t.Lfm2Config(**SIZES, full_attn_idxs=[2]),
    "lfm2_moe": lambda: t.Lfm2MoeConfig(
        **SIZES, **EXPERTS, num_dense_layers=1, layer_types=["conv", "conv", "full_attention", "conv"]
    ),
}
# Parameters with two dimensions that no token is multiplied with as a matrix.
NO_WEIGHTS = ("bias", "_norm.weight")


def stored_weights(config: PretrainedConfig) -> list[int]:
    """Return the number of weights of each layer in transformers' model, without norms and biases."""
    with torch.device("meta"):
        model = _class_of(config)(config)
    family = SUPPORTED[type(model).__name__]
    layers = model.get_submodule(f"{family.base}.{family.layers}")
    return [
        sum(
            value.numel()
            for name, value in layer.named_parameters()
            if value.ndim > 1 and not name.endswith(NO_WEIGHTS)
        )
        for layer in layers
    ]


def _class_of(config: PretrainedConfig) -> Any:
    named = [family.architecture for family in SUPPORTED.values() if family.model_type == config.model_type]
    return getattr(t, named[0])


def shapes_of(name: str, folder: Path) -> tuple[PretrainedConfig, tuple[LayerShape, ...]]:
    config = (FAMILIES | HYBRIDS)[name]()
    config.architectures = [_class_of(config).__name__]
    config.save_pretrained(folder)
    return config, read_layer_shapes(folder, describe_config(folder))


@pytest.mark.parametrize("name", sorted(FAMILIES | HYBRIDS))
def test_layers_have_the_weights_of_transformers_modules(name: str, tmp_path: Path) -> None:
    config, shapes = shapes_of(name, tmp_path)
    assert [shape.weights for shape in shapes] == stored_weights(config)
    assert all(0 < shape.token_weights <= shape.weights for shape in shapes)


def test_a_token_uses_the_chosen_experts_the_shared_ones_and_the_router(tmp_path: Path) -> None:
    config, shapes = shapes_of("deepseek_v3", tmp_path)
    expert = 3 * 48 * 32
    assert [shape.weights - shape.token_weights for shape in shapes] == [0, 0] + [(8 - 2) * expert] * 3
    assert count_kinds(shape.kind for shape in shapes) == (
        "2 latent attention with an MLP, 3 latent attention with experts"
    )


def test_latents_are_stored_once_for_all_heads(tmp_path: Path) -> None:
    _, shapes = shapes_of("deepseek_v3", tmp_path)
    assert {(one.token_values, one.kv_heads, one.score_channels) for one in shapes} == {(32 + 16, 1, 4 * (2 * 32 + 16))}
    assert shapes[0].shard_values(4) == 32 + 16


@pytest.mark.parametrize(
    ("name", "kinds", "state_values"),
    [
        ("qwen3_5_text", "3 linear, 1 attention", 4 * 12 * 8),
        ("granitemoehybrid", "3 mamba, 1 attention", 96 * 16),
        ("lfm2", "3 conv, 1 attention", 0),
    ],
)
def test_layers_with_a_state_store_no_keys(name: str, kinds: str, state_values: int, tmp_path: Path) -> None:
    _, shapes = shapes_of(name, tmp_path)
    assert count_kinds(shape.kind for shape in shapes) == kinds
    for shape in shapes:
        if shape.kind == "attention":
            assert (shape.token_values, shape.state_values) == (2 * 2 * shape.score_channels // 8, 0)
        else:
            assert (shape.token_values, shape.score_channels, shape.state_values) == (0, 0, state_values)


def test_config_json_may_leave_out_the_types_of_layers(tmp_path: Path) -> None:
    config = HYBRIDS["qwen3_next"]()
    kinds = {}
    for name, values in {
        "default": {},
        "interval": {"full_attention_interval": 2},
        "listed": {"layer_types": ["full_attention"] * 4},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        written = {**config.to_dict(), "mlp_only_layers": [], "architectures": ["Qwen3NextForCausalLM"]}
        del written["layer_types"]
        (folder / "config.json").write_text(json.dumps(written | values))
        kinds[name] = count_kinds(shape.kind for shape in read_layer_shapes(folder, describe_config(folder)))
    assert kinds == {
        "default": "3 linear, 1 attention",
        "interval": "2 linear, 2 attention",
        "listed": "4 attention",
    }


def test_a_size_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config = HYBRIDS["lfm2"]()
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"block_ffn_dim_multiplier": "two", "architectures": ["Lfm2ForCausalLM"]})
    )
    with pytest.raises(InputError, match="block_ffn_dim_multiplier is 'two'"):
        read_layer_shapes(tmp_path, describe_config(tmp_path))
