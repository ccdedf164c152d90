"""The float types of a run: the one in which it computes, and the one of its weights. Imports no torch.

`--dtype auto` computes in the type of the checkpoint, unless a CPU has no fast products in it. Few CPUs have such
products for bfloat16, and fewer for float16, in which we have none. Elsewhere torch converts each number for each
product, which takes several times as long as float32. So `auto` then computes in float32. Weights stay in the type of
the checkpoint, and are widened in registers. So they take no more memory, and the results are those of a float32 model
with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from sarathi_pp.errors import ConfigError

_NARROW = ("bfloat16", "float16")
# Bits of a code, by parts of the forms' names for the user. Weights in these forms can stay as they are stored.
_CODE_BITS = {"fp8": 8, "mxfp4": 4}
# Instructions with which oneDNN multiplies bfloat16 fast.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The float types of a run, by torch's names.

    Attributes:
        compute: type of activations, KV pages and logits.
        weights: type to which quantised weights are dequantised. Others stay in the type in which they are stored if
            `compute` can hold all its values.
        code_bits: bits of a code of the weights that stay as they are stored. Products of more than 16 rows expand them
            to `compute`. None: all weights are dequantised.
    """

    compute: str
    weights: str
    code_bits: int | None = None

    @property
    def coded(self) -> bool:
        """Return whether weights stay as codes and scales."""
        return self.code_bits is not None


def stored_code_bits(weights: str, quantised: str | None, device: str) -> int | None:
    """Return the bits of a code of weights that stay as they are stored; None if they are dequantised.

    Args:
        weights: the option --weights.
        quantised: form of the stored weights, for the user; None if they are not quantised.
        device: the option --device.

    Raises:
        ConfigError: the user wishes it, and the weights are not in FP8 or MXFP4, or the device is a CPU.
    """
    if weights != "stored":
        return None
    bits = _code_bits(quantised)
    if bits is None:
        found = "not quantised" if quantised is None else f"stored as {quantised}"
        raise ConfigError(
            f"--weights stored: the weights are {found}; use a checkpoint in FP8 or MXFP4, or leave out --weights"
        )
    if device == "cpu":
        raise ConfigError(
            "--weights stored: a CPU cannot keep weights as they are stored; leave out --weights, or use --device cuda"
        )
    return bits


def can_stay_coded(quantised: str | None) -> bool:
    """Return whether weights in this form can stay as they are stored on a GPU.

    Args:
        quantised: form of the stored weights, for the user; None if they are not quantised.
    """
    return _code_bits(quantised) is not None


def _code_bits(quantised: str | None) -> int | None:
    return next((bits for form, bits in _CODE_BITS.items() if form in (quantised or "").lower()), None)


def choose_dtypes(
    wish: str, stored: str, device: str, *, quantised: bool = False, code_bits: int | None = None
) -> Dtypes:
    """Return the float types of a run.

    Args:
        wish: the option --dtype.
        stored: type of the checkpoint's weights. For quantised ones, the type that config.json names.
        device: the option --device. CPUs are taken to be like the one here.
        quantised: the weights are quantised. They are dequantised to the type that the user wishes.
        code_bits: see Dtypes. No CPU keeps weights as they are stored.
    """
    if code_bits is not None:
        compute = stored if wish == "auto" else wish
        return Dtypes(compute, compute, code_bits)
    if wish != "auto":
        narrow = wish == "float32" and stored in _NARROW and not quantised
        return Dtypes(wish, stored if narrow and has_float_products() and computes_on_cpu(device) else wish)
    slow = stored == "float16" or (stored == "bfloat16" and not has_bf16_products())
    return Dtypes("float32" if slow and has_float_products() and computes_on_cpu(device) else stored, stored)


def why_slow(dtypes: Dtypes) -> str | None:
    """Return why a run on CPUs like the one here is several times as slow as it could be; None if it is not."""
    fast = dtypes.compute == "bfloat16" and (has_bf16_products() or not _BF16_FLAGS.isdisjoint(_cpu_flags()))
    if dtypes.compute not in _NARROW or fast:
        return None
    lacks_numba = find_spec("numba") is None
    remedy = "run  pip install 'sarathi-pp[cpu]'" if lacks_numba else "give --dtype float32"
    return (
        f"this CPU has no fast products in {dtypes.compute}. Linear layers take several times as long as in float32. "
        f"To avoid it, {remedy}"
    )


def has_bf16_products() -> bool:
    """Return whether our product in bfloat16 runs on this CPU. It needs AVX512-BF16, and the package numba.

    numba is optional, and slow to import.
    """
    try:
        from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16
    except ImportError:  # not installed, or not for this numpy
        return False
    return has_avx512_bf16()


def has_float_products() -> bool:
    """Return whether our product in float32 runs on this CPU. It needs numba, and AVX2, AVX512 or AArch64."""
    try:
        from sarathi_pp_kernels.cpu.simd.target import target
    except ImportError:
        return False
    return target().lanes > 0


@cache
def _cpu_flags() -> frozenset[str]:
    """Return Linux's names of the CPU's features; none if they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return frozenset(next(lines, "").split())


def computes_on_cpu(device: str) -> bool:
    """Return whether a run computes on CPUs.

    Args:
        device: the option --device. "auto" takes a GPU if torch finds one.
    """
    if device != "auto" or version("torch").endswith("+cpu"):
        return device != "cuda"
    import torch  # takes a second

    return not torch.cuda.is_available()
