"""Compile kernels with products for another processor, as numba would do on it, and print their assembly as JSON.

    NUMBA_CPU_NAME=neoverse-n1 NUMBA_CPU_FEATURES=+neon python -m tests.kernels.cpu.assembly aarch64-unknown-linux-gnu

LLVM has code generators for many processors. numba asks for the one of its own process, so another answer is enough.
"""

from __future__ import annotations

import json
import sys

import llvmlite.binding as llvm


def main(triple: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: triple
    # numba asks when it is imported.
    from numba import types
    from numba.core.caching import NullCache
    from sarathi_pp_kernels.cpu import attention_float, gemm
    from sarathi_pp_kernels.cpu.simd.target import target

    names = ["multiply_float", "multiply_float_bf16", "multiply_float_fp16"]
    names += ["multiply_bf16"] * (target().dot is not None)
    kernels = {name: (getattr(gemm, name), (*[types.int64] * 9, types.boolean)) for name in names}
    numbers = *[types.int64] * 16, types.float32, types.float32, *[types.int64] * 5
    kernels["attention_float"] = attention_float.attend, numbers
    found = {}
    for name, (kernel, signature) in kernels.items():
        kernel._cache = NullCache()  # this processor cannot run the code
        kernel.compile(signature)
        found[name] = kernel.inspect_asm(signature)
    print(json.dumps({"target": target()._asdict(), "assembly": found}))


if __name__ == "__main__":
    main(sys.argv[1])
