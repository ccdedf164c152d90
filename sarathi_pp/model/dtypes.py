"""The float types of a run: the one in which it computes, and the one of its weights. Imports no torch.

`--dtype auto` computes in the type of the checkpoint, unless a CPU has no fast products in it. Few CPUs have such
products for bfloat16, and none for float16. There, torch converts each number for each product, which takes several
times as long as float32. So `auto` then computes in float32. Weights stay in the type of the checkpoint, and are
widened in registers. So they take no more memory, and the results are those of a float32 model with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The float types of a run, by torch's names.

    Attributes:
        compute: type of activations, KV pages and logits.
        weights: type to which quantised weights are dequantised. Others stay in the type in which they are stored if
            `compute` can hold all its values.
    """

    compute: str
    weights: str


def choose_dtypes(wish: str, stored: str, *, on_cpu: bool) -> Dtypes:
    """Return the float types of a run.

    Args:
        wish: the option --dtype.
        stored: type of the checkpoint's weights. For quantised ones, the type that config.json names.
        on_cpu: the run computes on CPUs like the one here.
    """
    if wish != "auto":
        return Dtypes(wish, wish)
    slow = stored == "float16" or (stored == "bfloat16" and not has_bf16_products())
    return Dtypes("float32" if on_cpu and slow and has_float_products() else stored, stored)


def why_slow(dtypes: Dtypes) -> str | None:
    """Return why a run on CPUs like the one here is several times as slow as it could be; None if it is not."""
    if dtypes.compute == "float16" or (dtypes.compute == "bfloat16" and not has_bf16_products()):
        remedy = "give --dtype float32" if has_float_products() else "run  pip install 'sarathi-pp[cpu]'"
        return (
            f"this CPU has no fast products in {dtypes.compute}, or the package numba is missing; linear layers take "
            f"several times as long as in float32. To avoid it, {remedy}"
        )
    return None


def has_bf16_products() -> bool:
    """Return whether our product in bfloat16 runs on this CPU. It needs AVX512-BF16, and the package numba."""
    try:
        from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16  # numba is optional
    except ImportError:  # not installed, or not for this numpy
        return False
    return has_avx512_bf16()


def has_float_products() -> bool:
    """Return whether our product in float32 runs on this CPU. It needs AVX2 or AVX512, and the package numba."""
    try:
        from sarathi_pp_kernels.cpu.simd.target import target  # numba is optional
    except ImportError:
        return False
    return target().lanes > 0


def computes_on_cpu(device: str) -> bool:
    """Return whether a run computes on CPUs.

    Args:
        device: the option --device. "auto" takes a GPU if torch finds one.
    """
    if device != "auto" or version("torch").endswith("+cpu"):
        return device != "cuda"
    import torch  # takes a second

    return not torch.cuda.is_available()
