"""Environments in which kernels, torch and its libraries use only the instructions of a smaller processor.

    env $(python -m tests.processors avx2) pytest tests/kernels

A process reads these variables when it imports numba and torch, and its children inherit them. So every process of a
run uses the same instructions.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

_FEATURES = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2", "sse4.2", "popcnt")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# For each name: numba's processor and features (LLVM's names), and the instruction sets of torch, oneDNN and MKL.
_PROCESSORS = {
    "avx2": ("haswell", _FEATURES, "avx2", "AVX2", "AVX2"),
    "avx512": ("skylake-avx512", _FEATURES + _AVX512, "avx512", "AVX512_CORE", "AVX512"),
}
# Features that Linux names differently.
_OF_LINUX = {"bmi": "bmi1", "sse4.2": "sse4_2"}


def environment_of(name: str) -> dict[str, str]:
    """Return the variables that limit a process and its children to a processor: "avx2" or "avx512" (no bfloat16)."""
    processor, features, torch, onednn, mkl = _PROCESSORS[name]
    return {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features),
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }


def why_not(name: str) -> str | None:
    """Return why this machine cannot run the instructions of a processor, or None if it can."""
    if platform.machine() != "x86_64":
        return f"{name} is a set of x86 instructions, and this machine is {platform.machine()}"
    cpuinfo = Path("/proc/cpuinfo")
    present = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split()) if cpuinfo.exists() else set()
    missing = [one for one in _PROCESSORS[name][1] if _OF_LINUX.get(one, one) not in present]
    return f"this machine lacks {', '.join(missing)}" if missing else None


if __name__ == "__main__":
    if reason := why_not(sys.argv[1]):
        sys.exit(f"processors: {reason}")
    print(*(f"{name}={value}" for name, value in environment_of(sys.argv[1]).items()), sep="\n")
