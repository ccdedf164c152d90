"""Compile kernels with products for another processor, as numba would do on it, and print their assembly as JSON.

    NUMBA_CPU_NAME=neoverse-n1 NUMBA_CPU_FEATURES=+neon python -m tests.kernels.cpu.assembly \\
        aarch64-unknown-linux-gnu multiply_float attention_float

LLVM has code generators for many processors. numba asks for the one of its own process, so another answer is enough.
"""

from __future__ import annotations

import json
import sys

import llvmlite.binding as llvm


def main(triple: str, *names: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: triple
    # numba asks when it is imported.
    from numba import types
    from numba.core.caching import NullCache
    from sarathi_pp_kernels.cpu import attention_float, gemm
    from sarathi_pp_kernels.cpu.simd.target import target

    of_products = *[types.int64] * 9, types.boolean
    of_attention = *[types.int64] * 16, types.float32, types.float32, *[types.int64] * 5
    found = {}
    for name in names:
        is_product = name != "attention_float"
        kernel = getattr(gemm, name) if is_product else attention_float.attend
        signature = of_products if is_product else of_attention
        kernel._cache = NullCache()  # this processor cannot run the code
        kernel.compile(signature)
        found[name] = kernel.inspect_asm(signature)
    print(json.dumps({"target": target()._asdict(), "assembly": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
