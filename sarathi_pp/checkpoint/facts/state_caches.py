"""The states that a model's layers keep, from its config.json. Imports no torch.

To add a kind of layer, add a function that returns its StateCache, and an entry to _KINDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, StateCache

# Columns of a block of a recurrent state. Kernels keep one block in the first-level cache.
_COLUMNS = 16
_NO_LIMITS = [0.0, math.inf]
# Names in layer_types of layers with a state. The first names are those of older configurations.
STATE_LAYERS = ("mamba", "linear_attention", "conv")
# Names in layer_types of the layers that a family has, by the kind of its states (Family.states).
LAYER_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "delta_net": ("full_attention", "linear_attention"),
        "mamba": ("full_attention", "linear_attention", "attention", "mamba"),  # the last two in older files
        "conv": ("full_attention", "conv"),
    }
)
# Keys of config.json with the sizes of these layers.
STATE_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "delta_net": (
            *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
            "linear_conv_kernel_dim",
        ),
        "mamba": ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
        "conv": ("conv_L_cache",),
    }
)


def own_caches(
    config: ConfigFile, family: Family, num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[LayerCache, ...]:
    """Return the caches of all layers if some layers keep a state; otherwise an empty tuple.

    Args:
        num_kv_heads: KV heads of the attention layers.
        head_dim: channels of these heads.

    Raises:
        InputError: a size is no integer of at least 1.
        UnsupportedModelError: a size is null, or sizes do not fit each other.
    """
    types = layer_types(config, family, num_layers)
    if not any(kind in STATE_LAYERS for kind in types):
        return ()
    assert family.states is not None
    if family.states != "conv" and config.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refuse(
            f"hidden_act is {config.values['hidden_act']!r:.100}; layers with a state support only 'silu' after their "
            "convolution"
        )
    state, paged = _KINDS[family.states](config), PagedCache(num_kv_heads, head_dim, head_dim)
    return tuple(state if kind in STATE_LAYERS else paged for kind in types)


def layer_types(config: ConfigFile, family: Family, num_layers: int) -> list[str]:
    """Return the types of a model's layers, as transformers finds them; empty if no layer of the family has a state.

    `check_model` has checked layer_types, if config.json has it.
    """
    if family.states is None:
        return []
    given = config.values.get("layer_types")
    if not given and family.states == "mamba":
        given = config.values.get("layers_block_type")
    if isinstance(given, list):
        return [str(kind) for kind in given[:num_layers]]
    if family.states == "delta_net":
        interval = config.optional_size("full_attention_interval", 4) or 4
        return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    if family.states == "mamba":
        return ["linear_attention"] * num_layers
    attention = config.values.get("full_attn_idxs")
    indices = attention if isinstance(attention, list) else range(num_layers)
    return ["full_attention" if index in indices else "conv" for index in range(num_layers)]


def _delta_net(config: ConfigFile) -> StateCache:
    key_dim, value_dim = _size(config, "linear_key_head_dim", 128), _size(config, "linear_value_head_dim", 128)
    key_heads, value_heads = _size(config, "linear_num_key_heads", 16), _size(config, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.refuse(
            f"linear_num_value_heads is {value_heads}; expected a multiple of linear_num_key_heads, which is "
            f"{key_heads}"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateCache(
        (_earlier(config, "linear_conv_kernel_dim", 4), channels), _blocks(value_heads, key_dim, value_dim)
    )


def _mamba(config: ConfigFile) -> StateCache:
    heads, groups = _size(config, "mamba_n_heads", 128), _size(config, "mamba_n_groups", 1)
    _size(config, "mamba_chunk_size", 256)
    limits = config.values.get("time_step_limit", _NO_LIMITS)
    if limits not in (_NO_LIMITS, [0.0, {"__float__": "Infinity"}]):
        raise config.refuse(
            f"time_step_limit is {limits!r:.100}, and only 0 to infinity is supported: transformers limits the steps "
            "of prompts, but not those of the tokens after them"
        )
    state_dim = _size(config, "mamba_d_state", 256)
    width = _size(config, "mamba_expand", 2) * config.size("hidden_size")
    if width % heads or heads % groups:
        raise config.refuse(
            f"mamba_n_heads is {heads}; expected a divisor of mamba_expand * hidden_size, which is {width}, and a "
            f"multiple of mamba_n_groups, which is {groups}"
        )
    if (head_dim := config.values.get("mamba_d_head", "auto")) not in ("auto", width // heads):
        raise config.refuse(
            f"mamba_d_head is {head_dim!r:.100}; expected 'auto' or {width // heads}, which is mamba_expand * "
            "hidden_size / mamba_n_heads"
        )
    conv = _earlier(config, "mamba_d_conv", 4), width + 2 * groups * state_dim
    return StateCache(conv, _blocks(heads, state_dim, width // heads))


def _short_conv(config: ConfigFile) -> StateCache:
    return StateCache((_earlier(config, "conv_L_cache", 3), config.size("hidden_size")))


_KINDS: Mapping[str, Callable[[ConfigFile], StateCache]] = MappingProxyType(
    {"delta_net": _delta_net, "mamba": _mamba, "conv": _short_conv}
)


def _size(config: ConfigFile, key: str, default: int) -> int:
    """Return a size; the default of transformers' configuration class for an absent key."""
    size = config.optional_size(key, default)
    if size is None:
        raise config.refuse(f"{key} is null; expected an integer of at least 1")
    return size


def _earlier(config: ConfigFile, key: str, default: int) -> int:
    """Return the number of earlier inputs that a convolution reads: one less than its number of taps."""
    taps = _size(config, key, default)
    if taps < 2:
        raise config.refuse(f"{key} is {taps}; expected at least 2")
    return taps - 1


def _blocks(heads: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the states of all heads, in blocks of 16 columns if these divide a head's columns."""
    width = columns if columns % _COLUMNS else _COLUMNS
    return heads * columns // width, rows, width
