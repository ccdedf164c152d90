"""The names of policies. To add a policy to this package, write its file in this folder and add a line here."""

from __future__ import annotations

from sarathi_pp.core.policy.class_path import load_class
from sarathi_pp.core.policy.entry_points import choose_installed, installed_policies
from sarathi_pp.core.policy.view import Policy
from sarathi_pp.errors import ConfigError

# Name on the command line -> module:Class. A policy is imported when it is first used.
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
# Not a choice of --policy, because it does not serve requests: `sarathi-pp profile` runs it to measure a machine.
UNLISTED = {"calibration": "sarathi_pp.core.policy.calibration:Calibration"}


def is_built_in(name: str) -> bool:
    """Return whether the name is that of a policy in this package."""
    return name in POLICIES or name in UNLISTED


def find_class(name: str) -> type[Policy]:
    """Return the class of a policy.

    Args:
        name: name of a policy in this package, module:Class, or a name that an installed distribution registers.

    Raises:
        ConfigError: the name is none of these, and the message gives the choices. Or `load_class` refuses the class.
    """
    if is_built_in(name):
        return load_class((POLICIES | UNLISTED)[name], name)
    if ":" in name:
        return load_class(name, name)
    installed = installed_policies()
    if name not in installed:
        choices = ", ".join(sorted({*POLICIES, *installed}))
        raise ConfigError(
            f"--policy {name!r} is not known; choose one of {choices}, or give a class of yours as package.module:Class"
        )
    return load_class(choose_installed(name, installed[name]), name)
