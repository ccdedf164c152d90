"""The policies of this package. To add one, write its file in this folder and give it a line here."""

from __future__ import annotations

import importlib

from sarathi_pp.core.policy.view import Policy
from sarathi_pp.errors import ConfigError

# Name on the command line -> module:Class. A policy is imported when it is asked for.
POLICIES: dict[str, str] = {
    "balanced": "sarathi_pp.core.policy.balanced:Balanced",
    "chunkllm": "sarathi_pp.core.policy.chunkllm:ChunkLLM",
    "distserve": "sarathi_pp.core.policy.distserve:DistServe",
    "fastertransformer": "sarathi_pp.core.policy.fastertransformer:FasterTransformer",
    "gllm": "sarathi_pp.core.policy.gllm:GLLM",
    "orca": "sarathi_pp.core.policy.orca:Orca",
    "sarathi": "sarathi_pp.core.policy.sarathi:Sarathi",
    "sarathi-serve": "sarathi_pp.core.policy.sarathi_serve:SarathiServe",
    "sglang": "sarathi_pp.core.policy.sglang:SGLang",
    "splitfuse": "sarathi_pp.core.policy.splitfuse:SplitFuse",
    "tensorrt-llm": "sarathi_pp.core.policy.tensorrt_llm:TensorRTLLM",
    "tgi": "sarathi_pp.core.policy.tgi:TGI",
    "vllm": "sarathi_pp.core.policy.vllm:VLLM",
    "vllm-v0": "sarathi_pp.core.policy.vllm_v0:VLLMv0",
}
# Not to serve with, so not among the choices: `sarathi-pp profile` runs it.
UNLISTED = {"calibration": "sarathi_pp.core.policy.calibration:Calibration"}


def is_built_in(name: str) -> bool:
    return name in POLICIES or name in UNLISTED


def find_class(name: str) -> type[Policy]:
    """Return the class of the policy of that name. Raises ConfigError with the choices if there is none."""
    if not is_built_in(name):
        raise ConfigError(f"--policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    module, _, attribute = (POLICIES | UNLISTED)[name].partition(":")
    kind: type[Policy] = getattr(importlib.import_module(module), attribute)
    return kind
