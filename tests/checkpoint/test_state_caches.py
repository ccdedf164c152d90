"""The states of a model's layers, from config.json: the sizes of transformers' modules, and its defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import PagedCache, StateCache
from sarathi_pp.checkpoint.facts.support import ModelFacts, describe_config
from sarathi_pp.errors import InputError, UnsupportedModelError
from tests.model.families import FAMILIES, architecture

WITH_STATES = [name for name in FAMILIES if SUPPORTED[architecture(name)].states is not None]
MOST_SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def described(directory: Path, architecture: str, values: dict[str, Any]) -> ModelFacts:
    named = {"architectures": [architecture], "model_type": SUPPORTED[architecture].model_type}
    (directory / "config.json").write_text(json.dumps({**named, **values}))
    return describe_config(directory)


def sizes_of_modules(architecture: str, config: Any) -> list[tuple[int, int, int] | None]:
    """Return (channels, taps, values of the recurrent state) of transformers' layers; None for attention."""
    with torch.device("meta"):
        layers = getattr(transformers, architecture)(config).get_decoder().layers
    found: list[tuple[int, int, int] | None] = []
    for layer in layers:
        convolutions = [one for one in layer.modules() if isinstance(one, nn.Conv1d)]
        recurrent = 0
        for one in layer.modules():
            if hasattr(one, "head_k_dim"):
                recurrent = one.num_v_heads * one.head_k_dim * one.head_v_dim
            elif hasattr(one, "ssm_state_size"):
                recurrent = one.num_heads * one.head_dim * one.ssm_state_size
        found.append((convolutions[0].in_channels, convolutions[0].kernel_size[0], recurrent) if convolutions else None)
    return found


@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize("bare", [False, True])
def test_the_sizes_are_those_of_transformers(family: str, bare: bool, tmp_path: Path) -> None:
    """A bare config.json has none of the keys that have a default."""
    name = architecture(family)
    values = dict(MOST_SIZES) if bare else FAMILIES[family]().to_dict()
    if name == "Lfm2MoeForCausalLM":
        values.setdefault("layer_types", ["conv"] * 4 + ["full_attention"] * 2)  # transformers has no default
    if name == "Lfm2ForCausalLM" and bare:
        values["full_attn_idxs"] = [2, 5]
    facts = described(tmp_path, name, values)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    made: list[tuple[int, int, int] | None] = []
    for cache in facts.caches:
        if isinstance(cache, StateCache):
            recurrent = torch.Size(cache.recurrent).numel() if cache.recurrent else 0
            made.append((cache.conv[1], cache.conv[0] + 1, recurrent))
        else:
            made.append(None)
            assert isinstance(cache, PagedCache)
            assert (cache.num_heads, cache.key_dim) == (facts.num_kv_heads, facts.head_dim)
    assert made == sizes_of_modules(name, config)
    assert facts.own_caches and len(facts.own_caches) == facts.num_layers


def test_blocks_have_16_columns_if_these_divide_a_head(tmp_path: Path) -> None:
    values = MOST_SIZES | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24}
    for value_dim, blocks in ((32, (8, 24, 16)), (40, (4, 24, 40))):
        facts = described(tmp_path, "Qwen3NextForCausalLM", values | {"linear_value_head_dim": value_dim})
        assert facts.own_caches[0] == StateCache((3, 96 + 4 * value_dim), blocks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24; expected a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; expected at least 2"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is null; expected an integer"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0; expected an integer of at least 1"),
    ],
)
def test_impossible_sizes_are_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        described(tmp_path, "Qwen3NextForCausalLM", MOST_SIZES | changed)


@pytest.mark.parametrize("head_dim", [100, None, "x"])
def test_a_head_of_mamba_has_its_part_of_the_width(head_dim: Any, tmp_path: Path) -> None:
    values = MOST_SIZES | {"mamba_n_heads": 4}
    with pytest.raises(
        UnsupportedModelError, match=rf"mamba_d_head is {head_dim!r}; expected 'auto' or 128, which is mamba_expand"
    ):
        described(tmp_path, "GraniteMoeHybridForCausalLM", values | {"mamba_d_head": head_dim})
    for allowed in ("auto", 128):
        described(tmp_path, "GraniteMoeHybridForCausalLM", values | {"mamba_d_head": allowed})


@pytest.mark.parametrize("limits", [[0.0, 1.0], [0.1, float("inf")], None, "x"])
def test_limits_that_transformers_applies_to_prompts_only_are_refused(limits: Any, tmp_path: Path) -> None:
    values = MOST_SIZES | {"mamba_n_heads": 4, "time_step_limit": limits}
    with pytest.raises(UnsupportedModelError, match="time_step_limit is .*only 0 to infinity is supported"):
        described(tmp_path, "GraniteMoeHybridForCausalLM", values)
    for allowed in ([0.0, float("inf")], [0, {"__float__": "Infinity"}]):
        described(tmp_path, "GraniteMoeHybridForCausalLM", values | {"time_step_limit": allowed})


OTHER_TYPES = (
    ("Qwen3NextForCausalLM", "sliding_attention"),
    ("Qwen3NextForCausalLM", "mamba"),
    ("Qwen3_5ForCausalLM", "conv"),
    ("GraniteMoeHybridForCausalLM", "conv"),
    ("Lfm2ForCausalLM", "linear_attention"),
    ("LlamaForCausalLM", "linear_attention"),
)


def test_other_types_of_layers_are_refused(tmp_path: Path) -> None:
    """A family has one kind of states and no sliding windows. Other families have no states."""
    for name, kind in OTHER_TYPES:
        with pytest.raises(UnsupportedModelError, match=f"layer 5 is '{kind}'; {name} supports only"):
            described(tmp_path, name, MOST_SIZES | {"layer_types": ["full_attention"] * 5 + [kind]})


def test_only_granite_has_an_older_name_for_layer_types(tmp_path: Path) -> None:
    """transformers ignores the key in configurations of other families."""
    types = {"layers_block_type": ["mamba"] * 5 + ["attention"]}
    granite = described(tmp_path, "GraniteMoeHybridForCausalLM", MOST_SIZES | types | {"mamba_n_heads": 4})
    assert [isinstance(cache, StateCache) for cache in granite.caches] == [True] * 5 + [False]
    qwen = described(tmp_path, "Qwen3NextForCausalLM", MOST_SIZES | types)
    assert [isinstance(cache, StateCache) for cache in qwen.caches] == [True] * 3 + [False] + [True] * 2
