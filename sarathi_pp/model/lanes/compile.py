"""Compiling kernels that are written with lanes."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numba

# Sums may be reordered, so that loops fill the lanes. Not "fast": that would let a NaN vanish, and a broken sequence
# has to be seen.
_SETTINGS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}


def digest_of(folder: Path) -> str:
    """Of the modules in it."""
    return sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


_DIGEST = digest_of(Path(__file__).parent)


def has_lanes(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 in 512-bit registers, as far as Linux tells."""
    if not cpuinfo.exists():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return {"avx512f", "avx512bw", "avx512_bf16"} <= set(flags.split())


def compiled(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` that lets other threads run and keeps its machine code, where there is a folder to keep it in.

    numba compiles a kept function anew when that function's file has changed, and knows nothing of those here,
    whose instructions it is made of. So what is kept is kept under a digest of them, in a variable that nobody reads.
    """
    settings = {**_SETTINGS, **options}

    def decorate(function: Any) -> Any:
        code, cells = function.__code__, function.__closure__ or ()
        code = code.replace(co_freevars=(*code.co_freevars, "instructions"))
        function = FunctionType(code, function.__globals__, function.__name__, None, (*cells, CellType(_DIGEST)))
        try:
            return numba.njit(**settings, cache=True)(function)
        except RuntimeError:  # no such folder: compile at every start
            return numba.njit(**settings)(function)

    return decorate


def inlined(function: Any) -> Any:
    """For parts of kernels."""
    return numba.njit(**_SETTINGS, inline="always")(function)
