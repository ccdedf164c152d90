"""The text part of a multimodal model, as a model of its own. Imports no torch.

    config.json    text_config, or the keys themselves (Qwen 2 VL)    -> config.json of a text model
    tensors        language_model.model.layers.0. ...                 -> model.layers.0. ...
                   vision_tower. ..., multi_modal_projector. ...      -> not loaded

A row without images gets the same logits from the text part alone. Tests compare them with those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.checkpoint.files import Checkpoint, TensorEntry
from sarathi_pp.errors import InputError

_ENDING = "ForConditionalGeneration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A multimodal model.

    Attributes:
        text: type of the text part, if text_config names none.
        fixed: the text part always has that type.
        tied: tie_word_embeddings, if config.json has none.
        text_ties: tie_word_embeddings of text_config counts too.
        inner: name of the text part in transformers' multimodal model.
    """

    text: str
    fixed: bool = False
    tied: bool = False
    text_ties: bool = False
    inner: str = "language_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A type of text part.

    Attributes:
        family: model_type of the supported text model that computes the same.
        defaults: values of keys that text_config may leave out. A test compares them with transformers.
        forced: values that the multimodal model has, whatever text_config says. None removes a key.
    """

    family: str
    defaults: Mapping[str, object]
    forced: Mapping[str, object] = field(default_factory=dict)


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(text="gemma3_text", fixed=True, tied=True),
    "mistral3": Wrapper(text="mistral", tied=True),
    "qwen2_vl": Wrapper(text="qwen2_vl_text", fixed=True, text_ties=True),
    "qwen2_5_vl": Wrapper(text="qwen2_5_vl_text", fixed=True, text_ties=True),
    "qwen3_vl": Wrapper(text="qwen3_vl_text", fixed=True),
    "qwen3_vl_moe": Wrapper(text="qwen3_vl_moe_text", fixed=True),
    "qwen3_5": Wrapper(text="qwen3_5_text", fixed=True),
    "qwen3_5_moe": Wrapper(text="qwen3_5_moe_text", fixed=True),
    "internvl": Wrapper(text="qwen2", tied=True),
    "llava": Wrapper(text="llama", text_ties=True),
    "llava_next": Wrapper(text="llama"),
    "llava_onevision": Wrapper(text="qwen2", text_ties=True),
    "idefics3": Wrapper(text="llama", inner="text_model"),
    "smolvlm": Wrapper(text="llama", inner="text_model"),
    "glm4v": Wrapper(text="glm4v_text", fixed=True, text_ties=True),
    "aya_vision": Wrapper(text="cohere2", tied=True),
    "kimi_k25": Wrapper(text="deepseek_v3", tied=True),
}
"""Multimodal models whose text part is supported, by model_type."""


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


_NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
_QWEN2_VL = TextPart(
    family="qwen2",
    defaults=_sizes(152064, 8192, 29568, 80, 64, 32768)
    | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6},
)
_DEEPSEEK_V3 = TextPart(
    family="deepseek_v3",
    defaults=_sizes(129280, 7168, 18432, 61, 128, 4096) | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
)
TEXT_PARTS: Mapping[str, TextPart] = {
    "llama": TextPart(family="llama", defaults=_sizes(32000, 4096, 11008, 32, 32, 2048)),
    "mistral": TextPart(family="mistral", defaults=_sizes(32000, 4096, 14336, 32, 32, 131072)),
    "qwen2": TextPart(family="qwen2", defaults=_sizes(151936, 4096, 22016, 32, 32, 32768)),
    "qwen3": TextPart(family="qwen3", defaults=_sizes(151936, 4096, 22016, 32, 32, 32768)),
    "qwen3_moe": TextPart(family="qwen3_moe", defaults=_sizes(151936, 2048, 6144, 24, 32, 32768)),
    "gpt_oss": TextPart(family="gpt_oss", defaults=_sizes(201088, 2880, 2880, 36, 64, 131072)),
    # The multimodal model does not bound its logits, whatever its text part says.
    "gemma3_text": TextPart(
        family="gemma3_text",
        defaults=_sizes(262208, 2304, 9216, 26, 8, 131072),
        forced={"final_logit_softcapping": None},
    ),
    "ministral3": TextPart(family="ministral3", defaults=_sizes(131072, 4096, 14336, 34, 32, 262144)),
    # transformers' multimodal model does not scale its logits.
    "cohere2": TextPart(
        family="cohere2", defaults=_sizes(256000, 8192, 22528, 40, 64, 8192), forced={"logit_scale": 1.0}
    ),
    "mistral4": TextPart(
        family="mistral4",
        defaults=_sizes(131072, 4096, 12288, 36, 32, 1048576) | {"kv_lora_rank": 256, "qk_rope_head_dim": 64},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": TextPart(
        family="qwen3",
        defaults=_sizes(151936, 4096, 22016, 32, 32, 128000) | {"rope_theta": 5e5},
        forced=_NO_WINDOWS,
    ),
    "qwen3_vl_moe_text": TextPart(
        family="qwen3_moe",
        defaults=_sizes(151936, 2048, 5632, 24, 16, 128000)
        | {
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
        },
        forced=_NO_WINDOWS | {"norm_topk_prob": True},
    ),
    "qwen3_5_text": TextPart(family="qwen3_5_text", defaults=_sizes(248320, 4096, 12288, 32, 16, 32768)),
    "qwen3_5_moe_text": TextPart(
        family="qwen3_5_moe_text",
        defaults={
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "glm4v_text": TextPart(
        family="glm4",
        defaults=_sizes(151552, 4096, 13696, 40, 32, 32768) | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        forced={"attention_bias": True},
    ),
}
"""Types of text parts, by the model_type of text_config."""

# Sections of rotary channels for the time, height and width of an image. Text has the same position in all three.
_SECTIONS = ("mrope_section", "mrope_interleaved")
_ROPES = ("rope_parameters", "rope_scaling")
# Keys of the whole model that its text part needs too.
_OUTER = ("dtype", "torch_dtype", "quantization_config", "compression_config", "auto_map", "transformers_version")

_LM_HEAD = re.compile(r"^(?:(?:model\.)?language_model\.)?lm_head\.")
_KEPT = (
    (_LM_HEAD, "lm_head."),
    (re.compile(r"^language_model\.model\."), "model."),
    (re.compile(r"^model\.(?:language_model|text_model)\."), "model."),
    (re.compile(r"^model\.(?=(?:embed_tokens|layers|norm)\.)"), "model."),
    (re.compile(r"^mtp\."), "mtp."),  # surplus.py drops them
)
_DROPPED = re.compile(
    r"^(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|mm_projector|connector|image_newline)(?:\.|$)"
)
_MERGED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


def text_values(values: Mapping[str, Any], stored_names: Callable[[], tuple[str, ...]]) -> dict[str, Any] | None:
    """Return the config.json of the text part; None if this is not a multimodal model of WRAPPERS.

    Args:
        values: the config.json of the whole model.
        stored_names: returns the names of the stored tensors; empty if they are not known.
    """
    wrapper = WRAPPERS.get(str(values.get("model_type")))
    named = values.get("architectures") or [_ENDING]
    if wrapper is None or not isinstance(named, list) or not str(named[0]).endswith(_ENDING):
        return None
    text = values.get("text_config")
    if not isinstance(text, dict):  # Qwen 2 VL and 2.5 VL are published without one
        text = {key: value for key, value in values.items() if key not in ("vision_config", *_OUTER)}
    kind = wrapper.text if wrapper.fixed else text.get("model_type", wrapper.text)
    part = TEXT_PARTS.get(str(kind), TextPart(family=str(kind), defaults={}))
    ropes = {key: _plain_rope(text[key]) for key in _ROPES if isinstance(text.get(key), dict)}
    own = {key: value for key, value in text.items() if key not in _OUTER or value is not None}
    made = {**{key: values[key] for key in _OUTER if key in values}, **own, **ropes}
    inside: dict[str, Any] = next(iter(ropes.values()), {})
    made = {**{key: value for key, value in part.defaults.items() if key not in inside}, **made}
    if kind == "glm4v_text" and "head_dim" not in made:
        hidden, heads = made["hidden_size"], made["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:  # support.py names the key otherwise
            made["head_dim"] = hidden // heads
    made = {key: value for key, value in {**made, **part.forced}.items() if part.forced.get(key, ...) is not None}
    tied = values.get("tie_word_embeddings", wrapper.tied) or (wrapper.text_ties and text.get("tie_word_embeddings"))
    made["tie_word_embeddings"] = bool(tied) and not any(map(_LM_HEAD.match, stored_names()))
    architectures = [one.architecture for one in FAMILIES.values() if one.model_type == part.family]
    return {**made, "model_type": part.family, "architectures": architectures or [str(kind)]}


def text_checkpoint(checkpoint: Checkpoint, values: Mapping[str, Any], wrapper: str) -> tuple[Checkpoint, str]:
    """Return the tensors of the text part by the names of a text model, and a note about the others.

    Args:
        values: the config.json of the text part.
        wrapper: model_type of the multimodal model.

    Raises:
        InputError: a tensor is neither of the text part nor of a part that is known.
    """
    inner = f"model.{WRAPPERS[wrapper].inner}."
    kept: dict[str, TensorEntry] = {}
    aliases: dict[str, tuple[str, str]] = {}
    dropped = 0
    for key, entry in checkpoint.tensors.items():
        name = _text_name(key)
        if name is not None:
            kept[name] = _as_linear(key, entry, values) if _MERGED_EXPERTS.search(key) else entry
            aliases[name] = key, re.sub(r"^model\.", inner, name)
        elif _DROPPED.match(key):
            dropped += 1
        else:
            raise InputError(
                f"{entry.file}: {key} is in no known part of this model; expected its text part or its image part\n"
                "  try  another checkpoint of this model, as transformers saves it"
            )
    note = f"only the text part is loaded ({dropped:,} tensors for images are not)"
    return replace(checkpoint, tensors=kept, aliases=aliases), note


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings without the sections for images, in which all positions of a text token are equal."""
    plain = {key: value for key, value in rope.items() if key not in _SECTIONS}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def _text_name(key: str) -> str | None:
    """Return the name of a tensor in a text model; None if it is not of the text part."""
    for pattern, beginning in _KEPT:
        if pattern.match(key):
            return pattern.sub(beginning, key)
    return None


def _as_linear(key: str, entry: TensorEntry, values: Mapping[str, Any]) -> TensorEntry:
    """Return the experts of a layer as (experts, outputs, inputs). Published files have (experts, inputs, outputs).

    transformers itself saves the first form. The sizes show which one it is.

    Raises:
        InputError: the sizes do not show it.
    """
    hidden, width = values.get("hidden_size"), values.get("moe_intermediate_size")
    if values.get("model_type") != "qwen3_moe" or len(entry.shape) != 3 or not isinstance(width, int):
        return entry
    outputs, inputs = (2 * width, hidden) if key.endswith("gate_up_proj") else (hidden, width)
    if entry.shape[1:] != (inputs, outputs):
        return entry
    if inputs == outputs:
        raise InputError(
            f"{entry.file}: {key} has the shape {list(entry.shape)}, so it is not known which dimension is the input; "
            f"expected unequal inputs and outputs\n  try  another checkpoint of this model, with one tensor per expert"
        )
    return replace(entry, turned=True)
