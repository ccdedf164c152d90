"""Tiny models of every supported family, with the family's quirks switched on, and checkpoints of them.

Five layers, so that two stages and four are uneven. Windows of 12, so that prompts outgrow them. Every multiplier
differs from 1, so that applying it twice or not at all shows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from _pytest.mark import ParameterSet
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from tests import thinning

NUM_LAYERS = 5
VOCAB_SIZE = 128
WINDOW = 12

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# A fixed table, unlike the type "dynamic" of other families.
_ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
_MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
_DENSE_FIRST = ["dense", "sparse", "dense", "sparse", "sparse"]
# Experts in groups of which one is chosen, and shared experts.
_GROUPED: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "attention_bias": True,
}
# Latents of 32 channels and a rotary part of 16. Heads have keys of 12 + 16 channels and values of 20.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_DEEPSEEK_YARN = _YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8}
_HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Linear attention and gated attention. Kernels compute heads of 16 channels.
_DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "attention_bias": True,
    "rope_parameters": _HALF_ROPE,
}
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_proj_bias": True,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}


def _sizes(**changed: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (sizes | changed).items() if value is not ...}


def _experts(**changed: Any) -> dict[str, Any]:
    return _sizes(moe_intermediate_size=32, num_experts_per_tok=2, **changed)


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: t.LlamaConfig(
        **_sizes(
            attention_bias=True,
            mlp_bias=True,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters=_LLAMA3_ROPE,
        )
    ),
    "qwen2": lambda: t.Qwen2Config(
        **_sizes(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3, tie_word_embeddings=True)
    ),
    "qwen3": lambda: t.Qwen3Config(
        **_sizes(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters=_YARN_ROPE,
        )
    ),
    "mistral": lambda: t.MistralConfig(**_sizes(head_dim=16, sliding_window=WINDOW)),
    "gemma2": lambda: t.Gemma2Config(
        **_sizes(
            head_dim=16,
            sliding_window=WINDOW,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=1.0,
            attention_bias=True,
        )
    ),
    "gemma3_text": lambda: t.Gemma3TextConfig(
        **_sizes(
            head_dim=16,
            sliding_window=WINDOW,
            query_pre_attn_scalar=10,
            final_logit_softcapping=8.0,
            tie_word_embeddings=False,
            layer_types=_MIXED,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        )
    ),
    "phi3": lambda: t.Phi3Config(
        **_sizes(
            sliding_window=WINDOW,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    "olmo2": lambda: t.Olmo2Config(**_sizes(attention_bias=True)),
    "granite": lambda: t.GraniteConfig(
        **_sizes(
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            logits_scaling=2.5,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        )
    ),
    "cohere": lambda: t.CohereConfig(**_sizes(logit_scale=0.4, use_qk_norm=True, attention_bias=True)),
    "smollm3": lambda: t.SmolLM3Config(
        **_sizes(
            no_rope_layers=[1, 0, 1, 1, 0],
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            attention_bias=True,
            mlp_bias=True,
        )
    ),
    "glm4": lambda: t.Glm4Config(
        **_sizes(
            head_dim=16,
            attention_bias=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    "starcoder2": lambda: t.Starcoder2Config(**_sizes(sliding_window=WINDOW, use_bias=True)),
    "mixtral": lambda: t.MixtralConfig(
        **_sizes(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)
    ),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **_experts(
            num_experts=4,
            shared_expert_intermediate_size=32,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            qkv_bias=True,
        )
    ),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **_experts(
            head_dim=16,
            num_experts=4,
            mlp_only_layers=[0, 3],
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            attention_bias=True,
        )
    ),
    "gpt_oss": lambda: t.GptOssConfig(
        **_sizes(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters=_YARN_ROPE | {"truncate": False},
        )
    ),
    "gpt2": lambda: t.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=512,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "opt": lambda: t.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=512,
        do_layer_norm_before=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "opt_post_norm": lambda: t.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        word_embed_proj_dim=48,
        ffn_dim=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=512,
        do_layer_norm_before=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": lambda: t.GPTNeoXConfig(
        **_sizes(
            num_key_value_heads=...,
            use_parallel_residual=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    "phi": lambda: t.PhiConfig(
        **_sizes(
            qk_layernorm=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    # Some prompts are shorter than the original length, some are longer, and some become longer with their output.
    "phi3_longrope": lambda: t.Phi3Config(
        **_sizes(
            original_max_position_embeddings=30,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
        )
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **_experts(
            **_LATENT | _GROUPED,
            n_routed_experts=8,
            first_k_dense_replace=2,
            rope_parameters=_DEEPSEEK_YARN,
        )
    ),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **_experts(
            **_DELTA_NET,
            num_experts=4,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[0, 3],
        )
    ),
    "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(
        **_sizes(
            **_GRANITE,
            **_MAMBA,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            position_embedding_type="rope",
        )
    ),
    "ministral": lambda: t.MinistralConfig(**_sizes(head_dim=16, sliding_window=WINDOW, layer_types=_MIXED)),
    # Queries grow with their position, in steps of 16 tokens.
    "ministral3": lambda: t.Ministral3Config(
        **_sizes(
            head_dim=16,
            sliding_window=WINDOW,
            rope_parameters=_YARN_ROPE | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        )
    ),
    "gemma": lambda: t.GemmaConfig(**_sizes(head_dim=16, attention_bias=True)),
    "vaultgemma": lambda: t.VaultGemmaConfig(
        **_sizes(
            head_dim=16,
            sliding_window=WINDOW,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=1.0,
            attention_bias=True,
            layer_types=_MIXED,
        )
    ),
    "olmo": lambda: t.OlmoConfig(**_sizes(clip_qkv=1.5, attention_bias=True)),
    "olmo3": lambda: t.Olmo3Config(
        **_sizes(
            attention_bias=True,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": _YARN_ROPE,
            },
        )
    ),
    "glm": lambda: t.GlmConfig(**_sizes(head_dim=16, attention_bias=True)),
    "cohere2": lambda: t.Cohere2Config(
        **_sizes(logit_scale=0.4, attention_bias=True, sliding_window=WINDOW, layer_types=_MIXED)
    ),
    "seed_oss": lambda: t.SeedOssConfig(
        **_sizes(head_dim=16, attention_bias=True, attention_out_bias=True, mlp_bias=True)
    ),
    "exaone4": lambda: t.Exaone4Config(**_sizes(head_dim=16, sliding_window=WINDOW, layer_types=_MIXED)),
    "exaone4_full": lambda: t.Exaone4Config(**_sizes(sliding_window=None, layer_types=["full_attention"] * NUM_LAYERS)),
    "ernie4_5": lambda: t.Ernie4_5Config(**_sizes(head_dim=16, use_bias=True)),
    "cwm": lambda: t.CwmConfig(
        **_sizes(head_dim=16, mlp_bias=True, sliding_window=WINDOW, layer_types=_MIXED, rope_parameters=_LLAMA3_ROPE)
    ),
    "arcee": lambda: t.ArceeConfig(
        **_sizes(head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=_YARN_ROPE)
    ),
    "apertus": lambda: t.ApertusConfig(**_sizes(attention_bias=True, rope_parameters=_LLAMA3_ROPE)),
    "helium": lambda: t.HeliumConfig(**_sizes(head_dim=12, attention_bias=True, mlp_bias=True)),
    "jais2": lambda: t.Jais2Config(**_sizes(head_dim=16)),
    "hyperclovax": lambda: t.HyperCLOVAXConfig(
        **_sizes(
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            logits_scaling=0.4,
            attention_bias=True,
            mlp_bias=True,
        )
    ),
    "hunyuan_v1_dense": lambda: t.HunYuanDenseV1Config(
        **_sizes(head_dim=16, attention_bias=True, rope_parameters=_ALPHA_ROPE)
    ),
    "persimmon": lambda: t.PersimmonConfig(**_sizes(num_key_value_heads=..., qk_layernorm=True)),
    "biogpt": lambda: t.BioGptConfig(**_sizes(num_key_value_heads=..., pad_token_id=0)),
    "minimax_m2": lambda: t.MiniMaxM2Config(
        **_sizes(head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "glm4_moe": lambda: t.Glm4MoeConfig(
        **_experts(**_GROUPED, head_dim=16, n_routed_experts=8, first_k_dense_replace=2, use_qk_norm=True)
    ),
    "dots1": lambda: t.Dots1Config(
        **_experts(**_GROUPED, n_routed_experts=8, first_k_dense_replace=1, sliding_window=WINDOW, max_window_layers=2)
    ),
    "hy_v3": lambda: t.HYV3Config(
        **_experts(
            head_dim=16,
            num_experts=4,
            num_shared_experts=2,
            router_scaling_factor=1.7,
            mlp_layer_types=_DENSE_FIRST,
            attention_bias=True,
            mlp_bias=True,
        )
    ),
    "solar_open": lambda: t.SolarOpenConfig(
        **_experts(**_GROUPED, head_dim=16, n_routed_experts=8, rope_parameters=_YARN_ROPE)
    ),
    "exaone_moe": lambda: t.ExaoneMoeConfig(
        **_experts(
            num_experts=8,
            num_shared_experts=2,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.7,
            mlp_layer_types=_DENSE_FIRST,
            sliding_window=WINDOW,
            layer_types=_MIXED,
        )
    ),
    "ernie4_5_moe": lambda: t.Ernie4_5_MoeConfig(
        **_sizes(
            moe_intermediate_size=32,
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=3,
            moe_layer_interval=2,
            use_bias=True,
            tie_word_embeddings=False,
        )
    ),
    "mellum": lambda: t.MellumConfig(
        **_experts(
            head_dim=16,
            num_experts=4,
            mlp_layer_types=_DENSE_FIRST,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            attention_bias=True,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": _YARN_ROPE,
            },
        )
    ),
    "afmoe": lambda: t.AfmoeConfig(
        **_experts(
            head_dim=16,
            num_experts=4,
            num_shared_experts=2,
            num_dense_layers=2,
            route_scale=1.7,
            mup_enabled=True,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            attention_bias=True,
        )
    ),
    "hunyuan_v1_moe": lambda: t.HunYuanMoEV1Config(
        **_sizes(head_dim=16, num_experts=4, moe_topk=2, attention_bias=True, rope_parameters=_ALPHA_ROPE)
    ),
    "granitemoe": lambda: t.GraniteMoeConfig(
        **_sizes(**_GRANITE, num_local_experts=4, num_experts_per_tok=2, attention_bias=True)
    ),
    "granitemoeshared": lambda: t.GraniteMoeSharedConfig(
        **_sizes(
            **_GRANITE,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            tie_word_embeddings=True,
        )
    ),
    "deepseek_v2": lambda: t.DeepseekV2Config(
        **_experts(
            **_LATENT | {"q_lora_rank": None},
            n_routed_experts=6,
            n_shared_experts=2,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=1,
            routed_scaling_factor=1.7,
            rope_parameters=_DEEPSEEK_YARN,
        )
    ),
    "glm4_moe_lite": lambda: t.Glm4MoeLiteConfig(
        **_experts(**_LATENT | _GROUPED, n_routed_experts=8, mlp_layer_types=_DENSE_FIRST, rope_interleave=False)
    ),
    "mistral4": lambda: t.Mistral4Config(
        **_experts(
            **_LATENT | _GROUPED,
            n_routed_experts=8,
            first_k_dense_replace=1,
            rope_parameters=_DEEPSEEK_YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
        )
    ),
    "minicpm3": lambda: t.MiniCPM3Config(
        **_sizes(**_LATENT, scale_emb=3.0, scale_depth=1.2, dim_model_base=16, tie_word_embeddings=False)
    ),
    "youtu": lambda: t.YoutuConfig(**_sizes(**_LATENT | {"q_lora_rank": None}, attention_bias=True)),
    "axk1": lambda: t.AXK1Config(**_experts(**_LATENT | _GROUPED, n_routed_experts=8, mlp_layer_types=_DENSE_FIRST)),
    "olmoe": lambda: t.OlmoeConfig(
        **_sizes(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=1.0, attention_bias=True)
    ),
    "flex_olmo": lambda: t.FlexOlmoConfig(
        **_sizes(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True)
    ),
    # Positions in three sections, which are equal for text.
    "qwen3_5_text": lambda: t.Qwen3_5TextConfig(
        **_sizes(
            **_DELTA_NET
            | {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 2, "linear_value_head_dim": 32}
            | {"rope_parameters": {**_HALF_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
            tie_word_embeddings=True,
        )
    ),
    "qwen3_5_moe_text": lambda: t.Qwen3_5MoeTextConfig(
        **_experts(
            **_DELTA_NET | {"rope_parameters": {**_HALF_ROPE, "mrope_section": [1, 1, 2]}},
            num_experts=4,
            shared_expert_intermediate_size=32,
            intermediate_size=...,
        )
    ),
    # Without experts, and without positions.
    "granitemoehybrid_dense": lambda: t.GraniteMoeHybridConfig(
        **_sizes(**_GRANITE, **_MAMBA | {"mamba_n_groups": 1}, num_local_experts=0, tie_word_embeddings=True)
    ),
    "lfm2": lambda: t.Lfm2Config(
        **_sizes(
            layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
            conv_bias=True,
            conv_L_cache=4,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.5,
        )
    ),
    "lfm2_moe": lambda: t.Lfm2MoeConfig(
        **_experts(
            layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
            num_experts=4,
            num_dense_layers=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.7,
            conv_bias=True,
            tie_word_embeddings=False,
        )
    ),
}
"""Family name -> tiny config. A name may carry a variant after the family's own (`opt_post_norm`)."""

# Families of which the slower proofs run only with --full. By default their slices are compared with the whole model.
BRIEF = frozenset(list(FAMILIES)[list(FAMILIES).index("ministral") :])


# Families whose layers differ most: norms and biases, windows, sinks, experts, latent attention, states.
VARIED = ("llama", "gpt2", "gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid")


def thinned(
    families: Iterable[str] = FAMILIES, *, few: bool = False, also: Container[str] = (), oldest: bool = False
) -> list[ParameterSet]:
    """Return the families as test parameters. Those in BRIEF are marked `full`.

    Args:
        few: mark all families `full` that are not in VARIED or `also`.
        also: families that `few` keeps; none in BRIEF.
        oldest: mark families in VARIED `oldest`; all families with --full.
    """
    found = []
    for family in families:
        marks = [pytest.mark.full] if family in BRIEF or (few and family not in VARIED and family not in also) else []
        if oldest and (thinning.full or family in VARIED):
            marks.append(pytest.mark.oldest)
        found.append(pytest.param(family, marks=marks))
    return found


# (scale of the weights, scale of the embedding): greedy outputs must not settle on one token, and rounding errors must
# not grow. A tied head repeats its input token if the embedding outweighs the layers.
_SCALES: dict[str, tuple[float, float]] = {
    "qwen3": (0.8, 2.0),
    "qwen2": (1.2, 0.5),
    "gemma2": (1.5, 0.05),
    "gemma3_text": (1.5, 0.3),
    "phi3": (1.5, 1.0),
    "phi3_longrope": (1.5, 1.0),
    "olmo2": (1.5, 2.0),
    "granite": (1.5, 0.2),
    "cohere": (2.0, 0.2),
    "smollm3": (1.5, 0.2),
    "starcoder2": (1.5, 0.2),
    "mixtral": (1.2, 0.5),
    "qwen2_moe": (1.2, 1.0),
    "qwen3_moe": (0.8, 2.0),
    "gpt_oss": (1.2, 0.5),
    "gpt2": (2.0, 0.05),
    "opt": (2.5, 0.2),
    "opt_post_norm": (0.5, 0.5),
    "gpt_neox": (0.8, 4.0),
    "phi": (0.8, 4.0),
    "gemma": (1.5, 0.05),
    "vaultgemma": (1.5, 0.05),
    "biogpt": (2.5, 0.05),
    "olmoe": (0.8, 4.0),
    "flex_olmo": (1.2, 0.5),
    "deepseek_v2": (0.8, 4.0),
    "axk1": (1.2, 0.5),
    "granitemoe": (0.8, 0.4),
    "granitemoeshared": (0.8, 0.05),
    "qwen3_next": (0.8, 2.0),
    "qwen3_5_text": (2.0, 0.1),
    "qwen3_5_moe_text": (0.8, 2.0),
    "granitemoehybrid": (0.8, 0.4),
    "granitemoehybrid_dense": (0.8, 0.05),
    "lfm2": (1.5, 0.2),
    "lfm2_moe": (0.8, 0.4),
}
_DEFAULT_SCALES = (1.5, 0.5)


def is_too_old(family: str) -> bool:
    """Return whether the installed transformers is too old for a family of FAMILIES."""
    since = SUPPORTED[architecture(family)].since
    return since is not None and tuple(map(int, t.__version__.split(".")[:2])) < since


def latent_families() -> frozenset[str]:
    """Return the families of FAMILIES with latent attention."""
    return frozenset(family for family in FAMILIES if SUPPORTED[architecture(family)].latent is not None)


def architecture(family: str) -> str:
    """Return the class name of a family of FAMILIES."""
    model_type = FAMILIES[family]().model_type
    return next(name for name, known in SUPPORTED.items() if known.model_type == model_type)


def with_layers(family: str, num_layers: int) -> PretrainedConfig:
    """Return the family's config with only its first layers, for tests that are slow per layer."""
    config = FAMILIES[family]()
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config


def build_model(family: str, seed: int = 0, config: PretrainedConfig | None = None) -> Any:
    """Build the family's tiny transformers model in float32, unmodified, with weights drawn from the seed."""
    model = getattr(t, architecture(family))(config or FAMILIES[family]()).eval()
    _randomise(model, seed, *_SCALES.get(family, _DEFAULT_SCALES))
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA, the default in some releases, leaves the soft cap out
    if any(hasattr(model.config, name) for name in ("num_experts", "num_local_experts")):
        model.set_experts_implementation("eager")  # the default computes in bf16 only on CPU
    return model


def _randomise(model: Any, seed: int, weight_scale: float, embedding_scale: float) -> None:
    """Draw weights for which every layer matters and the next token depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embedding:
                parameter.copy_(embedding_scale * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(weight_scale * noise / min(parameter.shape[-2:]) ** 0.5)
            elif name.endswith(".A_log"):  # a state that is kept for some tokens
                parameter.copy_(noise - 2)
            elif parameter.mean() > 0.5:  # the gain of a norm
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)
        stored = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point() and not buffer.any():  # the bias of a router
                buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))


def write_checkpoint(
    family: str, directory: Path, seed: int = 0, shards: int = 1, config: PretrainedConfig | None = None
) -> Any:
    """Save `build_model(family, seed, config)` as safetensors in about `shards` files; returns the model."""
    model = build_model(family, seed, config)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory, max_shard_size="50GB" if shards == 1 else num_bytes // shards + 1)
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    return model
