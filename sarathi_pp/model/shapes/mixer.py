"""The sizes of the part of a layer that mixes tokens: attention, or another layer with a memory of earlier tokens."""

from __future__ import annotations

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.layer_shape import STATE_KINDS, LayerShape

ATTENTION, LATENT = "attention", "latent attention"
DELTA_NET, MAMBA, CONV = STATE_KINDS
# Kinds of layers by the name of their state (Family.states).
_OF_STATES = {"delta_net": DELTA_NET, "mamba": MAMBA, "conv": CONV}
# Families that multiply the output of attention by a gate, which has the size of the queries.
_GATED = ("afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def mixer_kinds(facts: ModelFacts) -> list[str]:
    """Return the kind of each layer, one of ATTENTION, LATENT, DELTA_NET, MAMBA and CONV."""
    states = FAMILIES[facts.architecture].states
    return [_kind_of(cache, states) for cache in facts.caches]


def _kind_of(cache: LayerCache, states: str | None) -> str:
    if isinstance(cache, PagedCache) and cache.latent:
        return LATENT
    return ATTENTION if isinstance(cache, PagedCache) or states is None else _OF_STATES[states]


def mixer_shape(kind: str, config: ConfigFile, facts: ModelFacts) -> LayerShape:
    """Return the shape of a layer of this kind, without its MLP."""
    return _SHAPES[kind](config, facts)


def _attention(config: ConfigFile, facts: ModelFacts) -> LayerShape:
    gates = facts.num_heads if facts.model_type in _GATED else 0
    weights = facts.hidden_size * facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads + gates)
    channels, values = 2 * facts.num_heads * facts.head_dim, 2 * facts.num_kv_heads * facts.head_dim
    return LayerShape(ATTENTION, weights, weights, channels, token_values=values, kv_heads=facts.num_kv_heads)


def _latent(config: ConfigFile, facts: ModelFacts) -> LayerShape:
    """Return the shape of latent attention (MLA) whose products are all absorbed (model/attention/latent.py)."""
    hidden, heads = facts.hidden_size, facts.num_heads
    cache = facts.caches[0]
    assert isinstance(cache, PagedCache), cache
    latent, rotary = cache.value_dim, cache.key_dim - cache.value_dim
    key, value = _size(config, "qk_nope_head_dim", 128), _size(config, "v_head_dim", 128)
    rank = config.optional_size("q_lora_rank", None)
    queries = heads * (key + rotary)
    weights = hidden * queries if rank is None else rank * (hidden + queries)
    weights += hidden * (latent + rotary) + latent * heads * (key + value) + heads * value * hidden
    channels = heads * (2 * latent + rotary)
    return LayerShape(LATENT, weights, weights, channels, channels, token_values=latent + rotary)


def _delta_net(config: ConfigFile, facts: ModelFacts) -> LayerShape:
    heads, value = _size(config, "linear_num_value_heads", 32), _size(config, "linear_value_head_dim", 128)
    key = _size(config, "linear_key_head_dim", 128)
    keys, values = _size(config, "linear_num_key_heads", 16) * key, heads * value
    weights = facts.hidden_size * (2 * keys + 3 * values + 2 * heads)  # queries, keys, values, gates, and the output
    weights += (2 * keys + values) * _size(config, "linear_conv_kernel_dim", 4)
    return LayerShape(DELTA_NET, weights, weights, state_values=values * key)


def _mamba(config: ConfigFile, facts: ModelFacts) -> LayerShape:
    """Return the shape of a Mamba-2 layer."""
    heads, state = _size(config, "mamba_n_heads", 128), _size(config, "mamba_d_state", 256)
    channels = _size(config, "mamba_expand", 2) * facts.hidden_size
    convolved = channels + 2 * _size(config, "mamba_n_groups", 1) * state
    weights = facts.hidden_size * (channels + convolved + heads) + channels * facts.hidden_size
    weights += convolved * _size(config, "mamba_d_conv", 4)
    return LayerShape(MAMBA, weights, weights, state_values=channels * state)


def _conv(config: ConfigFile, facts: ModelFacts) -> LayerShape:
    """Return the shape of a short convolution. Its state is a few rows, so it has no cost of its own."""
    weights = 4 * facts.hidden_size**2 + facts.hidden_size * _size(config, "conv_L_cache", 3)
    return LayerShape(CONV, weights, weights)


_SHAPES = {ATTENTION: _attention, LATENT: _latent, DELTA_NET: _delta_net, MAMBA: _mamba, CONV: _conv}


def _size(config: ConfigFile, key: str, default: int) -> int:
    return config.optional_size(key, default) or default
