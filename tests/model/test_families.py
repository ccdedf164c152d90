"""The special features of the families are switched on in their tiny models: without one of them, logits change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.model.loader import _has_experts
from tests.model.families import BRIEF, FAMILIES, NUM_LAYERS, VOCAB_SIZE, architecture, build_model

# The least change of the logits, as a share of the largest one. Slices must be as near as 1e-5.
LEAST = 1e-3
_FULL = ["full_attention"] * NUM_LAYERS
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_PER_TYPE = {"full_attention": _ROPE, "sliding_attention": _ROPE}

# Settings of config.json, and values that switch a feature off.
WITHOUT: dict[str, dict[str, Any]] = {
    "ministral": {"layer_types": _FULL},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": _ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.0},
    },
    "vaultgemma": {
        "layer_types": _FULL,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "olmo": {"clip_qkv": None},
    "olmo3": {"layer_types": _FULL, "rope_parameters": _ROPE_PER_TYPE},
    "glm": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}},
    "cohere2": {"layer_types": _FULL, "logit_scale": 1.0},
    "exaone4": {"layer_types": _FULL},
    "cwm": {"layer_types": _FULL, "rope_parameters": _ROPE},
    "arcee": {"rope_parameters": _ROPE},
    "apertus": {"rope_parameters": _ROPE},
    "hyperclovax": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 12**-0.5,
        "logits_scaling": 1.0,
    },
    "hunyuan_v1_dense": {"rope_parameters": _ROPE},
    "persimmon": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}},
    "biogpt": {"scale_embedding": False},
    "minimax_m2": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}},
    "glm4_moe": {
        "rope_parameters": _ROPE | {"partial_rotary_factor": 1.0},
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "dots1": {
        "layer_types": _FULL,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "hy_v3": {"router_scaling_factor": 1.0},
    "solar_open": {
        "rope_parameters": _ROPE | {"partial_rotary_factor": 1.0},
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "exaone_moe": {"layer_types": _FULL, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "mellum": {"layer_types": _FULL, "rope_parameters": _ROPE_PER_TYPE},
    "afmoe": {"layer_types": _FULL, "route_scale": 1.0, "mup_enabled": False},
    "hunyuan_v1_moe": {"rope_parameters": _ROPE},
    "granitemoe": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 12**-0.5,
        "logits_scaling": 1.0,
    },
    "granitemoeshared": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 12**-0.5,
        "logits_scaling": 1.0,
    },
    "deepseek_v2": {"rope_parameters": _ROPE, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": {
        "rope_parameters": _ROPE,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_interleave": False,
    },
    "glm4_moe_lite": {"topk_group": 2, "routed_scaling_factor": 1.0, "rope_interleave": True},
    "mistral4": {
        "rope_parameters": _ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.0}
        | {"partial_rotary_factor": 16 / 28}
    },
    "minicpm3": {"scale_emb": 1.0, "scale_depth": 5**0.5, "dim_model_base": 48},
    "youtu": {"rope_interleave": False},
    "axk1": {"topk_group": 2, "routed_scaling_factor": 1.0},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False},
    "qwen3_next": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}, "norm_topk_prob": False},
    "qwen3_5_text": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}},
    "qwen3_5_moe_text": {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}},
    "granitemoehybrid": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 12**-0.5,
        "logits_scaling": 1.0,
    },
    "lfm2_moe": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
}
# Kinds of tensors without an effect: the guard against an overflow in apertus's activation, and a summand that is the
# same for all keys of a query, because biogpt does not rotate keys.
NO_EFFECT = {"model.layers.N.mlp.act_fn.eps", "biogpt.layers.N.self_attn.k_proj.bias"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(model: Any) -> Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        found: Tensor = model(ids, use_cache=False).logits
    return found


@contextmanager
def zeroed(tensors: list[Tensor]) -> Iterator[None]:
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    yield
    for tensor, before in zip(tensors, kept, strict=True):
        tensor.copy_(before)


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(BRIEF))
@torch.no_grad()
def test_every_kind_of_tensor_changes_the_logits(family: str) -> None:
    """Without the tensors of one kind, such as the query biases of all layers, the model computes something else."""
    model = build_model(family)
    kinds: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(tensor)
    whole = logits(model)
    for kind, tensors in kinds.items():
        with zeroed(tensors):
            change = float((logits(model) - whole).abs().max() / whole.abs().max())
        assert (change > LEAST) != (kind in NO_EFFECT), (kind, change)
    assert torch.equal(logits(model), whole)


@pytest.mark.parametrize("family, key", [(family, key) for family, keys in WITHOUT.items() for key in keys])
def test_every_setting_changes_the_logits(family: str, key: str) -> None:
    model, config = build_model(family), FAMILIES[family]()
    setattr(config, key, WITHOUT[family][key])
    other = build_model(family, config=config)
    other.load_state_dict(model.state_dict())
    whole = logits(model)
    assert (logits(other) - whole).abs().max() > LEAST * whole.abs().max()


def test_experts_soft_caps_and_sinks_are_found() -> None:
    """The names of experts in config.json differ, and transformers gives each of them one of two names."""
    for family, config in FAMILIES.items():
        with torch.device("meta"):
            model = getattr(transformers, architecture(family))(config())
        names, known = [name for name, _ in model.named_parameters()], SUPPORTED[architecture(family)]
        assert _has_experts(model.config) == any(".experts." in name for name in names), family
        assert known.sinks == any(name.endswith(".sinks") for name in names), family
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        assert known.softcap == ("attn_logit_softcapping" if capped else None), family
