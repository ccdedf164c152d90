"""Tiny random checkpoints of multimodal models, as transformers saves them, for tests of their text part.

The text parts have what a wrapper and a plain text model could treat differently: windows, scaled rope, M-RoPE
sections, tied and untied LM heads, experts. Vision parts have one layer and are never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}  # 16 channels are 8 pairs
_MROPE3 = _MROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
_GLM_ROPE = _MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": _MROPE3 | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}

_PATCHES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_PATCHES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_CLIP = _PATCHES | {"model_type": "clip_vision_model", "projection_dim": 32}
_SIGLIP = _PATCHES | {"model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = _PATCHES | {"model_type": "pixtral", "head_dim": 16}
_VISUAL = {"depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "intermediate_size": 32}
_VISUAL2 = {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "patch_size": 14}
_VISUAL2_5 = _VISUAL | {"out_hidden_size": 64, "fullatt_block_indexes": [0]}
_VISUAL3 = _VISUAL | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
_KIMI = _PATCHES | {"pos_emb_height": 4, "pos_emb_width": 4}
_VISUAL_GLM = _VISUAL | {"out_hidden_size": 64, "image_size": 28}

KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOWS}, _SIGLIP, True),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 16, "sliding_window": 12}, _PIXTRAL, False),
    "mistral3_ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _YARN},
        _PIXTRAL,
        False,
    ),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": _MROPE}, _VISUAL2, False),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
        _VISUAL2_5,
        True,
    ),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 16, "rope_parameters": _MROPE3}, _VISUAL3, True),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"head_dim": 16, "rope_parameters": _MROPE3, "mlp_only_layers": [1], **_EXPERTS},
        _VISUAL3,
        False,
    ),
    "internvl": ("InternVL", {"model_type": "qwen2"}, _PATCHES, False),
    "internvl_qwen3_moe": ("InternVL", {"model_type": "qwen3_moe", "head_dim": 16, **_EXPERTS}, _PATCHES, False),
    "internvl_gpt_oss": (
        "InternVL",
        {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWS},
        _PATCHES,
        False,
    ),
    "aya_vision": ("AyaVision", {"model_type": "cohere2", **_WINDOWS}, _SIGLIP, True),
    "llava": ("Llava", {"model_type": "llama"}, _CLIP, False),
    "llava_pixtral": ("Llava", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}, _PIXTRAL, False),
    "llava_next": ("LlavaNext", {"model_type": "mistral", "sliding_window": 12}, _CLIP, False),
    "llava_onevision": ("LlavaOnevision", {"model_type": "qwen2"}, _SIGLIP, True),
    "idefics3": ("Idefics3", {"model_type": "llama"}, _PATCHES, False),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, _PATCHES, False),
    "mistral3_mistral4": (
        "Mistral3",
        {"model_type": "mistral4", **_LATENT, "rope_parameters": {**_YARN}},
        _PIXTRAL,
        False,
    ),
    "kimi_k25": ("Kimi_K25", {"model_type": "deepseek_v3", **_LATENT}, _KIMI, False),
    "glm4v": ("Glm4v", {"rope_parameters": _GLM_ROPE}, _VISUAL_GLM, False),
    "qwen3_5": ("Qwen3_5", _DELTA_NET, _VISUAL3, True),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 24}, _VISUAL3, False),
}
"""Kind -> stem of the class names, settings of the text part and of the vision part, and whether the LM head is tied.

A kind may carry the type of its text part after the wrapper's own name."""


def make(kind: str, directory: Path, old_names: bool = False) -> None:
    """Write config.json and model.safetensors of a kind of KINDS. They are the same in every call.

    Args:
        old_names: name the tensors as most published files do. Kinds with one form of names ignore it, but the
            experts of qwen3_vl_moe are then stored transposed, as published.
    """
    stem, text, vision, tied = KINDS[kind]
    config = getattr(t, f"{stem}Config")(text_config=_SIZES | text, vision_config=vision, tie_word_embeddings=tied)
    model = getattr(t, f"{stem}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embedding:  # a tied head repeats its input token if the embedding outweighs the layers
                parameter.copy_((0.02 if kind == "gemma3" else 0.2 if tied else 0.5) * noise)
            elif parameter.ndim >= 2:
                parameter.copy_((3.0 if kind == "gemma3" else 1.5) * noise / min(parameter.shape[-2:]) ** 0.5)
            elif name.endswith(".A_log"):  # transformers draws it from its own generator
                parameter.copy_(noise - 2)
            else:  # norms' gains start at 1, or at 0 where 1 is added; biases at 0
                parameter.copy_(parameter.round() + 0.1 * noise)
    model.save_pretrained(directory, save_original_format=old_names)
    if kind == "qwen3_vl_moe" and old_names:
        tensors = load_file(directory / "model.safetensors")
        turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
        save_file(tensors | turned, directory / "model.safetensors", metadata={"format": "pt"})
    if kind == "kimi_k25" and old_names:  # transformers names text layers like image layers
        tensors = load_file(directory / "model.safetensors")
        named = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensors[name]
            for name in tensors
        }
        save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
