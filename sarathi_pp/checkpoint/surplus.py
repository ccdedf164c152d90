"""The stored tensors that no causal language model computes with. Imports no torch.

Published checkpoints hold tables that a model makes itself (rotary tables, causal masks), heads left from training for
another task, layers for multi-token prediction (MTP), and counters. They change no logit, so they are not loaded. Any
other tensor that the model of config.json does not have is an error, because these weights may be those of another
model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sarathi_pp.checkpoint.files import Checkpoint, TensorEntry
from sarathi_pp.errors import UnsupportedModelError

FLOATS = ("F64", "F32", "F16", "BF16")
# Patterns of the whole stored name. A test checks that no tensor that a supported family computes with matches.
_KINDS = (
    ("rotary tables", re.compile(r"(^|\.)rotary_emb\.|(^|\.)(inv_freq|cos_cached|sin_cached)$")),
    ("causal masks", re.compile(r"(^|\.)(attn|attention|self_attn)\.masked_bias$")),
    ("position ids", re.compile(r"(^|\.)position_ids$")),
    ("scales of a quantised KV cache", re.compile(r"\.[kv]_scale$")),
    ("layers that predict further tokens", re.compile(r"^mtp\.")),
    ("heads of another task", re.compile(r"^(v_head|value_head|reward_head|score|classifier)\.")),
)
_MASK = re.compile(r"(^|\.)(attn|attention|self_attn)\.bias$")
# Endings of weights, and of the parts of quantised ones, such as those of an LM head.
_OF_WEIGHTS = (
    *(".weight", ".bias", ".qweight", ".qzeros", ".scales", ".g_idx", "_blocks", "_scales"),
    *("_packed", "_shape", "_scale", "_scale_inv", "_zero_point", "_g_idx"),
)
_IN_LAYER = re.compile(r"(^|\.)\d+\.")
# Keys of config.json with the number of layers for multi-token prediction.
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")
_OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def draft_layers(values: Mapping[str, object]) -> range:
    """Return the indexes of the layers for multi-token prediction. They are stored after the model's own layers.

    Args:
        values: config.json. Numbers that are none name no such layers; support.py reports them.
    """
    num_layers = values.get("num_hidden_layers")
    num_drafts = [value for key in _DRAFTS if isinstance(value := values.get(key), int)]
    if not isinstance(num_layers, int) or not num_drafts:
        return range(0)
    return range(num_layers, num_layers + max(num_drafts))


def surplus_kind(key: str, entry: TensorEntry, drafts: range = range(0)) -> str | None:
    """Return the kind of a stored tensor that changes no logit, or None if the model may compute with it.

    Args:
        drafts: see `draft_layers`.
    """
    if drafts and (layer := _OF_LAYER.search(key)) is not None and int(layer[1]) in drafts:
        return "layers for multi-token prediction"
    for kind, names in _KINDS:
        if names.search(key):
            return kind
    if _MASK.search(key) and len(entry.shape) == 4:
        return "causal masks"
    if entry.dtype not in FLOATS and not _IN_LAYER.search(key) and not key.endswith(_OF_WEIGHTS):
        return "statistics"
    return None


def needed_tensors(checkpoint: Checkpoint, drafts: range) -> Mapping[str, TensorEntry]:
    """Return the tensors that the model may compute with, by stored name. See `surplus_kind` for the arguments."""
    return {key: entry for key, entry in checkpoint.tensors.items() if surplus_kind(key, entry, drafts) is None}


def refuse_types(tensors: Mapping[str, TensorEntry]) -> None:
    """Raise UnsupportedModelError for the first tensor whose stored type is none of FLOATS."""
    for key, entry in tensors.items():
        if entry.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"{entry.file}: tensor {key} is stored as {entry.dtype}; weights are read from {', '.join(FLOATS)}. "
                f"If these weights are quantised, config.json must have a quantization_config; download it again"
            )


def surplus_note(checkpoint: Checkpoint, drafts: range) -> str | None:
    """Return a sentence that names the tensors that are not loaded, or None if there are none. See `surplus_kind`."""
    found: dict[str, list[str]] = {}
    for key, entry in checkpoint.tensors.items():
        if (kind := surplus_kind(key, entry, drafts)) is not None:
            found.setdefault(kind, []).append(key)
    if not found:
        return None
    named = "; ".join(
        f"{kind} ({keys[0]}{f' and {len(keys) - 1} more' if keys[1:] else ''})" for kind, keys in found.items()
    )
    return f"tensors that affect no token are not loaded: {named}"
