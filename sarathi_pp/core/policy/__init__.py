"""Policies by name. `--policy NAME[:key=value,...]` builds one; unknown names and keys are errors."""

from __future__ import annotations

import dataclasses
from typing import Any

from sarathi_pp.core.policy.balanced import Balanced
from sarathi_pp.core.policy.calibration import Calibration
from sarathi_pp.core.policy.chunkllm import ChunkLLM
from sarathi_pp.core.policy.distserve import DistServe
from sarathi_pp.core.policy.fastertransformer import FasterTransformer
from sarathi_pp.core.policy.gllm import GLLM
from sarathi_pp.core.policy.orca import Orca
from sarathi_pp.core.policy.parameter import read_parameter
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.sarathi_serve import SarathiServe
from sarathi_pp.core.policy.sglang import SGLang
from sarathi_pp.core.policy.splitfuse import SplitFuse
from sarathi_pp.core.policy.tensorrt_llm import TensorRTLLM
from sarathi_pp.core.policy.tgi import TGI
from sarathi_pp.core.policy.view import Policy
from sarathi_pp.core.policy.vllm import VLLM
from sarathi_pp.core.policy.vllm_v0 import VLLMv0
from sarathi_pp.errors import ConfigError

POLICIES: dict[str, type[Any]] = {
    "balanced": Balanced,
    "chunkllm": ChunkLLM,
    "distserve": DistServe,
    "fastertransformer": FasterTransformer,
    "gllm": GLLM,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-serve": SarathiServe,
    "sglang": SGLang,
    "splitfuse": SplitFuse,
    "tensorrt-llm": TensorRTLLM,
    "tgi": TGI,
    "vllm": VLLM,
    "vllm-v0": VLLMv0,
}

# Not to serve with, so not among the choices: `sarathi-pp profile` runs it.
_UNLISTED: dict[str, type[Any]] = {"calibration": Calibration}

_USES_CHUNK_SIZE = frozenset(
    {"balanced", "distserve", "sarathi", "sarathi-serve", "sglang", "splitfuse", "tensorrt-llm", "vllm"}
)
# Of those, the ones that choose their sizes below it.
_CHOOSES_CHUNK_SIZE = frozenset({"balanced"})
# One microbatch more in flight than stages where it serves; for others that costs throughput.
_HAS_ONE_TO_SPARE = frozenset({"balanced"})
# Those that look at where the paragraphs of a prompt end (Request.paragraph_ends).
_USES_PARAGRAPHS = frozenset({"chunkllm"})
# Those that ask what microbatches cost (View.cost).
_USES_COST = frozenset({"balanced", "sglang"})

_AUTO_CHUNK_SIZE = 256
_AUTO_CEILING = 2048


def uses_chunk_size(spec: str) -> bool:
    """Whether the chunk size makes a difference to the policy that `spec` names."""
    return _name(spec) in _USES_CHUNK_SIZE


def chooses_chunk_size(spec: str) -> bool:
    """Whether the chunk size is to that policy a ceiling, below which it chooses by itself."""
    return _name(spec) in _CHOOSES_CHUNK_SIZE


def auto_chunk_size(spec: str) -> int:
    """Most tokens in a microbatch of the policy that `spec` names, unless the user or a profile says."""
    return _AUTO_CEILING if chooses_chunk_size(spec) else _AUTO_CHUNK_SIZE


def auto_inflight(spec: str, num_stages: int) -> int:
    """Most microbatches at once of the policy that `spec` names, unless the user or a profile says."""
    return num_stages + (_name(spec) in _HAS_ONE_TO_SPARE and num_stages > 1)


def make_policy(spec: str) -> Policy:
    """The policy that `NAME` or `NAME:key=value,...` names.

    Raises ConfigError naming the key that is given twice, or the name, key or value that is not legal, and the choices.
    """
    name, _, text = spec.partition(":")
    kind = POLICIES.get(name) or _UNLISTED.get(name)
    if kind is None:
        raise ConfigError(f"--policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    values: dict[str, float] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key not in fields:
            takes = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"--policy {spec}: {name} has no parameter {key!r}; it takes: {takes}")
        if key in values:
            raise ConfigError(f"--policy {spec}: {key} is given twice")
        try:
            values[key] = read_parameter(fields[key], value)
        except ValueError as error:
            raise ConfigError(f"--policy {spec}: {key} is {value!r}; it must be {error}") from None
    policy: Policy = kind(**values)
    return policy


def keeps_tbt_slo(spec: str) -> bool:
    """Whether the policy that `spec` names can be held to a bound on the time between tokens."""
    return hasattr(POLICIES.get(_name(spec)), "tbt_slo")


def with_tbt_slo(spec: str, seconds: float) -> str:
    """The policy that `spec` names, held to a bound on the time between tokens.

    Raises ConfigError where it keeps none. A name that is not known is left for `make_policy` to refuse.
    """
    name, _, text = spec.partition(":")
    if name not in POLICIES:
        return spec
    if not keeps_tbt_slo(spec):
        raise ConfigError(f"--tbt-slo {seconds:g}: {name} keeps no bound on the time between tokens; balanced does")
    return f"{name}:{text}{',' if text else ''}tbt_slo={seconds!r}"


def wants_paragraphs(spec: str) -> bool:
    """Whether requests for this policy should say where their paragraphs end; finding that out takes time."""
    return _name(spec) in _USES_PARAGRAPHS


def wants_cost(spec: str) -> bool:
    """Whether the coordinator should learn, for this policy, what microbatches cost; that takes time with each."""
    return _name(spec) in _USES_COST


def _name(spec: str) -> str:
    return spec.partition(":")[0]
