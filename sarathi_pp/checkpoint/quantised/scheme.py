"""The form in which a checkpoint's weights are quantised, from its config.json. Imports no torch.

    method               published by                       codes                  scales
    fp8                  DeepSeek, Qwen, MiniMax, Mistral   8-bit floats           per block, channel or tensor
    mxfp4                OpenAI (gpt-oss)                   4-bit floats           powers of 2 per 32 values
    compressed-tensors   the vLLM project, Moonshot (Kimi)  4- or 8-bit integers,  per group, channel, tensor or block
                                                            8-bit floats
    gptq                 Qwen and others                    4- or 8-bit integers   per group, also in another order
    awq                  Qwen and others                    4-bit integers         per group

Weights are dequantised when they are loaded. On a GPU, FP8 and MXFP4 can stay (--weights stored). Activations stay in
the dtype of the run, also if the publisher's engine quantises them. Other methods are refused by name, before any
weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.errors import UnsupportedModelError

# What a run does with quantised weights, for the user.
DEQUANTISED = "weights are dequantised when they are loaded"
KEPT_AS_STORED = "weights of layers stay as stored on the GPU, and products of more than 16 rows expand them"

METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq")
Method = Literal["fp8", "mxfp4", "compressed-tensors", "gptq", "awq"]

QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
_REMEDY = f"use a checkpoint of this model in {', '.join(METHODS[:-1])} or {METHODS[-1]}, or the unquantised one"
_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_CT_STRATEGIES = ("tensor", "channel", "group", "block")
_FP8_BLOCK = (128, 128)
# Class names of modules with a weight matrix, as compressed-tensors' targets name them.
_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The form of some weights of a compressed-tensors checkpoint.

    Attributes:
        bits: bits of a code.
        is_float: codes are floats; otherwise they are integers.
        symmetric: all zero points are 0.
        group_size: number of values of a row that share a scale; None if the scales are not by group.
        block: rows and columns of values that share a scale; None if the scales are not by block.
    """

    bits: int
    is_float: bool
    symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None

    @property
    def title(self) -> str:
        kind = f"{'fp' if self.is_float else 'int'}{self.bits}"
        if self.block is not None:
            return f"{kind}, blocks of {self.block[0]} x {self.block[1]}"
        return f"{kind}, groups of {self.group_size}" if self.group_size is not None else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The form in which the weights of a checkpoint are quantised.

    Attributes:
        title: the method and its sizes, for the user; None if no weight is quantised.
        block: of fp8: rows and columns of values that share a scale. A scale per channel or tensor is known by its
            shape.
        group_size: of awq: number of inputs that share a scale; None: all inputs do.
        rules: of compressed-tensors: the rule for each target. A target is a module's name, a regular expression that
            begins with `re:`, or the class name Linear. Regular expressions are sorted.
        activations: the publisher's engine quantises activations (or keys and values) too.
    """

    method: Method
    title: str | None
    block: tuple[int, int] = _FP8_BLOCK
    group_size: int | None = None
    rules: Mapping[str, WeightRule] = field(default_factory=dict)
    activations: bool = False

    def rule(self, *names: str) -> WeightRule | None:
        """Return the rule for a module of a compressed-tensors checkpoint; None if there is none.

        As in compressed-tensors (match_targets), a name precedes a regular expression, and that precedes a class. Of
        several regular expressions, the first one in alphabetical order counts.

        Args:
            names: names of the module. One of a multimodal model has several.
        """
        for name in names:
            if name in self.rules:
                return self.rules[name]
        for target, rule in self.rules.items():
            pattern = target.removeprefix("re:")
            if pattern != target and any(re.match(pattern, name) for name in names):
                return rule
        return self.rules.get(_LINEAR)

    @property
    def note(self) -> str:
        """A sentence for the user about what is done with the quantised weights."""
        if self.title is None:
            return f"config.json quantises only activations ({self.method}); they are not quantised here"
        kept = "; activations are not quantised" if self.activations else ""
        return f"{DEQUANTISED} ({self.title}){kept}"


def read_scheme(config: ConfigFile) -> Scheme | None:
    """Return the form in which the weights of a model are quantised; None if they are not quantised.

    Raises:
        UnsupportedModelError: weights in this form are not read. The message names the form and the remedy.
    """
    found = next((config.values[key] for key in QUANTISATION_KEYS if config.values.get(key)), None)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise config.refuse(f"quantised weights ({found!s:.100}) are not read; {_REMEDY}")
    method = found.get("quant_method") or _unnamed_method(found)
    try:
        if method == "fp8":
            return _fp8(found)
        if method == "mxfp4":
            return Scheme(method="mxfp4", title="MXFP4")
        if method == "compressed-tensors":
            return _compressed_tensors(found)
        if method == "gptq":
            return _gptq(found)
        if method == "awq":
            return _awq(found)
    except _Refused as refused:
        raise config.refuse(f"weights quantised by {method} with {refused} are not read; {_REMEDY}") from None
    raise config.refuse(f"quantised weights ({method!s:.100}) are not read; {_REMEDY}")


class _Refused(UnsupportedModelError):
    """A setting of a known method that is not supported. Its text names the setting and the value."""


def _unnamed_method(found: Mapping[str, Any]) -> str:
    """Return the method of a configuration that does not name it."""
    if "config_groups" in found:
        return "compressed-tensors"
    return "MLX" if {"bits", "group_size"} <= set(found) else "without quant_method"


def _require(found: Mapping[str, Any], key: str, legal: tuple[object, ...]) -> None:
    """Raise if a setting is none of the legal values. An absent setting is legal."""
    value = found.get(key)
    if value is not None and (value not in legal or isinstance(value, float)):
        raise _Refused(f"{key} {value!r:.100} (read: {', '.join(map(str, legal))})")


def _pair(found: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if the setting is absent."""
    value = found.get(key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise _Refused(f"{key} {value!r:.100} (read: two positive integers)")
    return value[0], value[1]


def _group_size(found: Mapping[str, Any]) -> int | None:
    """Return the group size; None if a whole row is one group."""
    value = found.get("group_size")
    if value is None or value == -1:
        return None
    if type(value) is not int or value < 1:
        raise _Refused(f"group_size {value!r:.100} (read: a positive integer, or -1)")
    return value


def _fp8(found: Mapping[str, Any]) -> Scheme:
    _require(found, "fmt", ("e4m3", "e5m2", "float8_e4m3fn"))
    _require(found, "scale_fmt", ("ue8m0", "float"))
    block = _pair(found, "weight_block_size")
    title = f"FP8, blocks of {block[0]} x {block[1]}" if block else "FP8"
    return Scheme(method="fp8", title=title, block=block or _FP8_BLOCK, activations=True)


def _compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    _require(found, "format", _CT_FORMATS)
    _require(found, "quantization_status", ("compressed",))
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, dict):
        _require(sparsity, "format", ("dense",))
    if found.get("transform_config"):
        raise _Refused("a transform_config (rotations at run time)")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(one, dict) for one in groups.values()):
        raise _Refused(f"config_groups {groups!r:.100}")
    rules = {target: rule for group in groups.values() for rule in _weight_rules(group) for target in _targets(group)}
    activations = any(group.get("input_activations") for group in groups.values()) or bool(found.get("kv_cache_scheme"))
    titles = "; ".join(dict.fromkeys(rule.title for rule in rules.values()))
    return Scheme(
        method="compressed-tensors",
        title=f"compressed-tensors, {titles}" if rules else None,
        rules=dict(sorted(rules.items())),
        activations=activations,
    )


def _weight_rules(group: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Yield the rule of one of compressed-tensors' config_groups; none if it quantises only activations."""
    _require(group, "format", _CT_FORMATS)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return
    is_float = weights.get("type") == "float"
    _require(weights, "type", ("int", "float"))
    _require(weights, "num_bits", (8,) if is_float else (4, 8))
    group_size, block = _group_size(weights), _pair(weights, "block_structure")
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy not in _CT_STRATEGIES:
        raise _Refused(f"strategy {strategy!r:.100} (read: {', '.join(_CT_STRATEGIES)})")
    if strategy == "block" and block is None:
        raise _Refused("the strategy block without block_structure")
    yield WeightRule(
        bits=weights.get("num_bits") or 8,
        is_float=is_float,
        symmetric=weights.get("symmetric") is not False,
        group_size=group_size if strategy == "group" else None,
        block=block if strategy == "block" else None,
    )


def _targets(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that a rule is for. Raise if they are no list of names and patterns."""
    targets = group.get("targets") or [_LINEAR]
    try:
        for target in targets:
            re.compile(target.removeprefix("re:"))
    except (TypeError, AttributeError, re.error):
        targets = None
    if not isinstance(targets, list):
        raise _Refused(f"targets {group['targets']!r:.100} (read: a list of names and patterns)")
    return tuple(targets)


def _gptq(found: Mapping[str, Any]) -> Scheme:
    _require(found, "bits", (4, 8))
    for key in ("checkpoint_format", "format"):
        _require(found, key, ("gptq",))
    _require(found, "is_marlin_format", (False,))
    group_size = _group_size(found)
    groups = f", groups of {group_size}" if group_size is not None else ""
    return Scheme(method="gptq", title=f"GPTQ, int{found.get('bits', 4)}{groups}")


def _awq(found: Mapping[str, Any]) -> Scheme:
    _require(found, "bits", (4,))
    version = str(found.get("version") or "gemm").lower()
    _require({"version": version}, "version", ("gemm",))
    group_size = _group_size(found)
    groups = f", groups of {group_size}" if group_size is not None else ""
    return Scheme(method="awq", title=f"AWQ, int4{groups}", group_size=group_size)
