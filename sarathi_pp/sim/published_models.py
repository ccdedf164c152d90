"""Published models of which some layers differ from others, for presets. Sizes are those of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache
from sarathi_pp.checkpoint.facts.mlp import MLPShape
from sarathi_pp.checkpoint.facts.state_caches import own_caches
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.layer_shape import LayerShape
from sarathi_pp.model.shapes.layers import layer_shapes


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The sizes of a model."""

    name: str
    hidden_size: int
    vocab_size: int
    shapes: tuple[LayerShape, ...]


def deepseek_v3() -> PublishedModel:
    """Return DeepSeek-V3 (arXiv 2412.19437, section 4.2): 671e9 weights, of which a token uses 37e9.

    61 layers. The first 3 have an MLP of 18432 channels, the others 256 experts of 2048 channels and a shared one; a
    token uses 8. Latents have 512 channels, their rotary part 64. All products with latents are absorbed, as in
    model/attention/latent.py. The layer for multi-token prediction is left out.
    """
    config: dict[str, object] = {
        "intermediate_size": 18432,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    caches = (PagedCache(1, 512 + 64, 512, latent=True),) * 61
    facts = _facts("DeepseekV3ForCausalLM", 61, 7168, 129280, 128, caches)
    return _model("deepseek-v3", facts, config, MLPShape(2048, 3, num_experts=256, experts_per_token=8))


def qwen3_5_397b() -> PublishedModel:
    """Return the text part of Qwen3.5-397B-A17B: 397e9 weights, of which a token uses 17e9.

    60 layers, of which every fourth is attention (15) and the others gated delta-nets (45). The channels of heads and
    the convolution are the defaults of transformers' Qwen3_5MoeTextConfig.

    The other sizes are assumed, because no config.json was at hand: hidden size 4096, 32 query and 2 KV heads, 16 key
    and 64 value heads of the delta-net, 512 experts of 1024 channels, of which a token uses 10, and a shared one of
    1024. With these sizes the model has the two numbers of weights in its name. A test checks that.
    """
    config: dict[str, object] = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "shared_expert_intermediate_size": 1024,
    }
    name = "Qwen3_5MoeForCausalLM"
    caches = own_caches(ConfigFile(Path(name), config), FAMILIES[name], 60, 2, 256)
    facts = _facts(name, 60, 4096, 248320, 32, caches)
    return _model("qwen3.5-397b-a17b", facts, config, MLPShape(1024, 3, num_experts=512, experts_per_token=10))


def _model(name: str, facts: ModelFacts, config: Mapping[str, object], mlp: MLPShape) -> PublishedModel:
    shapes = layer_shapes(ConfigFile(Path(name), dict(config)), facts, mlp)
    return PublishedModel(name, facts.hidden_size, facts.vocab_size, shapes)


def _facts(
    architecture: str,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    num_heads: int,
    caches: tuple[LayerCache, ...],
) -> ModelFacts:
    paged = next(cache for cache in caches if isinstance(cache, PagedCache))
    return ModelFacts(
        model_type=FAMILIES[architecture].model_type,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=paged.num_heads,
        head_dim=paged.key_dim,
        vocab_size=vocab_size,
        max_position_embeddings=1 << 20,
        dtype="bfloat16",
        tie_word_embeddings=False,
        fingerprint="",
        own_caches=caches,
    )
