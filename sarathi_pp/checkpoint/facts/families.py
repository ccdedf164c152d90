"""The supported architectures (families), with the facts about each that other modules need. Imports no torch.

Tests check every family in this table. A model that is split into stages, with paged keys and values, must give the
logits of the unmodified transformers model. Module names are paths inside the `...ForCausalLM` class:

    base.embed  base.positions  base.layers.0 .. base.layers.N-1  base.norm  lm_head
    |------- first stage ------|------ the stage of layer i ----|--- last stage ---|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One supported architecture.

    Attributes:
        architecture: name of the `...ForCausalLM` class, as in config.json.
        model_type: name of transformers' configuration class, as in config.json.
        aliases: other model types under which it is published, with the same keys in config.json.
        base: path of the base model, which holds all modules except the LM head. The paths below start inside it.
        positions: module of learned positions; None if the family has none.
        project_in: module between embedding and layers; None if the family has none.
        project_out: module between layers and LM head; None if the family has none.
        lm_head: path of the LM head, outside the base model.
        windows: layers with a sliding window of the length `sliding_window` in config.json. "none": no layer, and
            the key is ignored. "every": all layers, if the key is set. "by_type": the layers that
            `layer_types` calls sliding_attention. This repeats how the model builds its masks, because not every
            family passes the window to its attention function (qwen2_moe does not).
        once: attributes of the base model: factors that it multiplies with its input, or flags that switch such a
            factor on. A token must get them once, at the embedding. So a stage whose input comes from another stage
            sets factors to 1 and flags to False.
        softcap: name in config.json of the bound on attention scores; None if the family has no bound.
        sinks: attention has sinks: one more logit per head in the softmax, without a key or a value.
        latent: multi-head latent attention (MLA): layers keep one latent per token, not keys and values per head. These
            are kv_lora_rank and qk_rope_head_dim if config.json has none. None: plain attention.
        keys: names in config.json of hidden_size and other settings, if they differ from these names.
        kv_heads: num_key_value_heads if config.json has none, as in transformers' configuration class. None: the
            number of attention heads. A test compares kv_heads, head_dim and tied with transformers.
        head_dim: head_dim if config.json has none. None: hidden_size // number of attention heads.
        tied: tie_word_embeddings if config.json has none: the LM head uses the embedding's weight.
        tied_key: older name of tie_word_embeddings in config.json, which goes before it; None if there is none.
        longrope_after: original_max_position_embeddings if config.json has none: the most tokens for which rotary
            embeddings of the type longrope use the short factors. transformers' `generate` computes a longer sequence
            again, with the long factors. None: it does not do so for this family, and longrope is refused.
        fixed_dynamic_rope: a rope of type "dynamic" with the key `alpha` is a fixed table. Without the key it depends
            on the longest sequence of a batch, as in other families, and is refused.
        states: kind of the layers that keep a state instead of KV pages (state_caches.py): "delta_net" for linear
            attention, "mamba", or "conv" for short convolutions. None: all layers are attention.
        widths: names in config.json of the sizes that tensor parallelism divides among ranks, besides the numbers of
            heads (tensor_parallel.py). None: tensor parallelism is not proven exact, so it is refused.
        since: oldest supported release of transformers, if it is newer than that of other families. In older ones,
            layers do not pass arguments on to the modules with a state.
    """

    architecture: str
    model_type: str
    aliases: tuple[str, ...] = ()
    base: str = "model"
    embed: str = "embed_tokens"
    positions: str | None = None
    project_in: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    project_out: str | None = None
    lm_head: str = "lm_head"
    windows: Literal["none", "every", "by_type"] = "none"
    once: tuple[str, ...] = ()
    softcap: str | None = None
    sinks: bool = False
    latent: tuple[int, int] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    tied_key: str | None = None
    longrope_after: int | None = None
    fixed_dynamic_rope: bool = False
    states: Literal["delta_net", "mamba", "conv"] | None = None
    since: tuple[int, int] | None = None
    widths: tuple[str, ...] | None = None

    @property
    def first_modules(self) -> tuple[str, ...]:
        """Names of the modules whose weights only the first stage needs (and the last stage, for a tied LM head)."""
        return tuple(name for name in (self.embed, self.positions, self.project_in) if name is not None)


_DENSE = ("intermediate_size",)
_EXPERTS = ("intermediate_size", "moe_intermediate_size")

_ALL = (
    Family(architecture="LlamaForCausalLM", model_type="llama", widths=_DENSE),
    Family(architecture="Qwen2ForCausalLM", model_type="qwen2", windows="by_type", kv_heads=32, widths=_DENSE),
    Family(
        architecture="Qwen3ForCausalLM", model_type="qwen3", windows="by_type", kv_heads=32, head_dim=128, widths=_DENSE
    ),
    Family(architecture="MistralForCausalLM", model_type="mistral", windows="every", kv_heads=8, widths=_DENSE),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        windows="by_type",
        softcap="attn_logit_softcapping",
        kv_heads=4,
        head_dim=256,
        tied=True,
        widths=_DENSE,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        windows="by_type",
        kv_heads=4,
        head_dim=256,
        tied=True,
        widths=_DENSE,
    ),
    Family(architecture="Phi3ForCausalLM", model_type="phi3", windows="every", longrope_after=4096),
    Family(architecture="Olmo2ForCausalLM", model_type="olmo2"),
    Family(architecture="GraniteForCausalLM", model_type="granite", once=("embedding_multiplier",), widths=_DENSE),
    Family(architecture="CohereForCausalLM", model_type="cohere", tied=True),
    Family(
        architecture="SmolLM3ForCausalLM", model_type="smollm3", windows="by_type", kv_heads=4, tied=True, widths=_DENSE
    ),
    Family(architecture="Glm4ForCausalLM", model_type="glm4", kv_heads=2, head_dim=128),
    Family(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        windows="every",
        kv_heads=2,
        tied=True,
        widths=_DENSE,
    ),
    Family(architecture="MixtralForCausalLM", model_type="mixtral", windows="every", kv_heads=8, widths=_DENSE),
    Family(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", windows="by_type", kv_heads=16, widths=_EXPERTS),
    Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", windows="every", kv_heads=4, widths=_EXPERTS),
    Family(
        architecture="GptOssForCausalLM", model_type="gpt_oss", windows="by_type", sinks=True, kv_heads=8, head_dim=64
    ),
    Family(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        base="transformer",
        embed="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        keys={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        tied=True,
    ),
    Family(
        architecture="OPTForCausalLM",
        model_type="opt",
        base="model.decoder",
        positions="embed_positions",
        project_in="project_in",
        norm="final_layer_norm",
        project_out="project_out",
        tied=True,
    ),
    Family(
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        base="gpt_neox",
        embed="embed_in",
        norm="final_layer_norm",
        widths=_DENSE,
    ),
    Family(architecture="PhiForCausalLM", model_type="phi", norm="final_layernorm", widths=_DENSE),
    Family(architecture="MinistralForCausalLM", model_type="ministral", windows="by_type", kv_heads=8, widths=_DENSE),
    Family(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        windows="every",
        kv_heads=8,
        head_dim=128,
        widths=_DENSE,
    ),
    Family(architecture="GemmaForCausalLM", model_type="gemma", kv_heads=16, head_dim=256, tied=True, widths=_DENSE),
    Family(
        architecture="VaultGemmaForCausalLM",
        model_type="vaultgemma",
        windows="by_type",
        softcap="attn_logit_softcapping",
        kv_heads=4,
        head_dim=256,
        tied=True,
        widths=_DENSE,
    ),
    Family(architecture="OlmoForCausalLM", model_type="olmo", widths=_DENSE),
    Family(architecture="Olmo3ForCausalLM", model_type="olmo3", windows="by_type"),
    Family(architecture="GlmForCausalLM", model_type="glm", kv_heads=2, head_dim=128),
    Family(architecture="Cohere2ForCausalLM", model_type="cohere2", windows="by_type", tied=True, widths=_DENSE),
    Family(architecture="SeedOssForCausalLM", model_type="seed_oss", kv_heads=8, head_dim=128, widths=_DENSE),
    Family(architecture="Exaone4ForCausalLM", model_type="exaone4", windows="by_type", kv_heads=32, widths=_DENSE),
    Family(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        kv_heads=2,
        head_dim=128,
        tied=True,
        widths=_DENSE,
    ),
    Family(architecture="CwmForCausalLM", model_type="cwm", windows="by_type", kv_heads=8, head_dim=128, widths=_DENSE),
    Family(architecture="ArceeForCausalLM", model_type="arcee", widths=_DENSE),
    Family(architecture="ApertusForCausalLM", model_type="apertus", widths=_DENSE),
    Family(architecture="HeliumForCausalLM", model_type="helium", kv_heads=20, head_dim=128, widths=_DENSE),
    Family(architecture="Jais2ForCausalLM", model_type="jais2", widths=_DENSE),
    Family(
        architecture="HyperCLOVAXForCausalLM", model_type="hyperclovax", once=("embedding_multiplier",), widths=_DENSE
    ),
    Family(architecture="HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense", fixed_dynamic_rope=True),
    Family(architecture="PersimmonForCausalLM", model_type="persimmon", norm="final_layernorm"),
    Family(
        architecture="BioGptForCausalLM",
        model_type="biogpt",
        base="biogpt",
        positions="embed_positions",
        norm="layer_norm",
        lm_head="output_projection",
        tied=True,
    ),
    Family(architecture="MiniMaxM2ForCausalLM", model_type="minimax_m2", kv_heads=8, head_dim=128),
    Family(architecture="Glm4MoeForCausalLM", model_type="glm4_moe", kv_heads=8, widths=_EXPERTS),
    Family(architecture="Dots1ForCausalLM", model_type="dots1", windows="by_type", kv_heads=32, widths=_EXPERTS),
    Family(architecture="HYV3ForCausalLM", model_type="hy_v3", kv_heads=8, head_dim=128, widths=_EXPERTS),
    Family(
        architecture="SolarOpenForCausalLM",
        model_type="solar_open",
        kv_heads=8,
        head_dim=128,
        widths=("moe_intermediate_size",),
    ),
    Family(
        architecture="ExaoneMoeForCausalLM",
        model_type="exaone_moe",
        windows="by_type",
        kv_heads=32,
        widths=_EXPERTS,
    ),
    Family(architecture="Ernie4_5_MoeForCausalLM", model_type="ernie4_5_moe", kv_heads=4, tied=True, widths=_EXPERTS),
    Family(
        architecture="MellumForCausalLM",
        model_type="mellum",
        windows="by_type",
        kv_heads=4,
        head_dim=128,
        widths=_EXPERTS,
    ),
    Family(
        architecture="AfmoeForCausalLM",
        model_type="afmoe",
        windows="by_type",
        once=("config.mup_enabled",),
        head_dim=128,
    ),
    Family(architecture="HunYuanMoEV1ForCausalLM", model_type="hunyuan_v1_moe", fixed_dynamic_rope=True),
    Family(architecture="GraniteMoeForCausalLM", model_type="granitemoe", once=("embedding_multiplier",)),
    Family(architecture="GraniteMoeSharedForCausalLM", model_type="granitemoeshared", once=("embedding_multiplier",)),
    Family(architecture="OlmoeForCausalLM", model_type="olmoe"),
    Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", latent=(512, 64)),
    Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", aliases=("kimi_k2",), latent=(512, 64)),
    Family(architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", latent=(512, 64)),
    Family(architecture="Mistral4ForCausalLM", model_type="mistral4", latent=(256, 64)),
    Family(architecture="MiniCPM3ForCausalLM", model_type="minicpm3", tied=True, latent=(256, 32)),
    Family(architecture="YoutuForCausalLM", model_type="youtu", tied=True, latent=(512, 64)),
    Family(architecture="AXK1ForCausalLM", model_type="axk1", latent=(512, 64)),
    Family(architecture="FlexOlmoForCausalLM", model_type="flex_olmo"),
    Family(architecture="Qwen3NextForCausalLM", model_type="qwen3_next", kv_heads=2, head_dim=256, states="delta_net"),
    Family(architecture="Qwen3_5ForCausalLM", model_type="qwen3_5_text", kv_heads=4, head_dim=256, states="delta_net"),
    Family(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        kv_heads=2,
        head_dim=256,
        states="delta_net",
    ),
    Family(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        once=("embedding_multiplier",),
        states="mamba",
    ),
    Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        norm="embedding_norm",
        kv_heads=8,
        tied=True,
        tied_key="tie_embedding",
        states="conv",
        since=(5, 22),
    ),
    Family(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        norm="embedding_norm",
        kv_heads=8,
        tied=True,
        tied_key="tie_embedding",
        states="conv",
        since=(5, 22),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _ALL})
"""Families by architecture, the class name in config.json."""

_OWN_CODE = "it computes attention with its own code, which cannot read KV pages"
_ALIBI = "it computes attention with its own code and adds a bias per distance (ALiBi)"
_NO_ARGUMENTS = "its layers do not pass arguments on to attention, so attention cannot find its KV pages"

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "BloomForCausalLM": _ALIBI,
        "FalconForCausalLM": _ALIBI,
        "MptForCausalLM": _ALIBI,
        "CodeGenForCausalLM": _OWN_CODE,
        "GPTJForCausalLM": _OWN_CODE,
        "GPTNeoForCausalLM": _OWN_CODE,
        "XGLMForCausalLM": _OWN_CODE,
        "NemotronForCausalLM": _NO_ARGUMENTS,
        "StableLmForCausalLM": _NO_ARGUMENTS,
        "DiffLlamaForCausalLM": "each layer computes attention twice, with two sets of values for the same keys",
        "LongcatFlashForCausalLM": "each layer computes attention twice, so it has two caches",
        "NanoChatForCausalLM": "it applies its last norm to the input of its layers too, so every stage would",
        "PhimoeForCausalLM": "the scale of its rotary embedding depends on the longest sequence of a batch",
    }
)
"""Architectures of decoder layers that an entry cannot add, with the reasons, which errors and documentation name."""
