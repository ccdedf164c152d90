"""The processor that kernels are compiled for: its registers, and how it multiplies.

numba compiles for this machine, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another processor. Which kernels can
run, and the sizes of their tiles, follow from the description of that processor:

    processor         float32 per register    registers    for sums    adds products of bfloat16 pairs
    AVX512            16                      32           24          with AVX512-BF16: vdpbf16ps
    AVX2 and FMA      8                       16           12          no
    AArch64 (NEON)    4                       32           16          with FEAT_BF16: bfdot
    other             0                       0            0           no

On AArch64, a line of a weight takes four registers, and eight if its pairs of bfloat16 are widened. With more than half
of the registers for sums, LLVM would store some of the others in memory within the loop.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba.core.registry import cpu_target

# Number of float32 values of a line, see simd/__init__.py.
_LINE = 16


class Target(NamedTuple):
    """The SIMD registers of a processor, and its instruction for pairs of bfloat16.

    Attributes:
        lanes: number of float32 values of a register. It is 0 if no instruction multiplies and adds them.
        num_registers: number of registers that a program can name.
        num_sums: number of registers for the sums of a wide tile (gemm.py). The others hold a line and a number of x.
        dot: LLVM's function that adds the products of bfloat16 pairs to float32 sums; None if there is no such
            instruction. It takes one register of sums and two of pairs.
    """

    lanes: int
    num_registers: int
    num_sums: int
    dot: str | None = None

    def most_rows(self, sums: int, panels: int) -> int:
        """Return the most rows of a tile, an even number, whose sums fit into some registers; 0 if none do.

        Args:
            sums: number of registers for sums.
            panels: number of panels of the tile. Each adds a line of sums per row.
        """
        return sums * self.lanes // (_LINE * panels) // 2 * 2


NOTHING = Target(0, 0, 0)


def describe(triple: str, features: str) -> Target:
    """Return the description of a processor.

    Args:
        triple: architecture, vendor and system, as LLVM writes them.
        features: names of the processor's features, each after a plus sign, as LLVM writes them.
    """
    present = set(features.split(","))
    if triple.startswith(("aarch64", "arm64")):
        return Target(4, 32, 16, "llvm.aarch64.neon.bfdot.v4f32.v8bf16" if "+bf16" in present else None)
    if "+avx512f" in present:
        has_bf16 = {"+avx512bw", "+avx512bf16"} <= present
        return Target(16, 32, 24, "llvm.x86.avx512bf16.dpbf16ps.512" if has_bf16 else None)
    return Target(8, 16, 12) if {"+avx2", "+fma"} <= present else NOTHING


@cache
def target() -> Target:
    """Return the description of the processor that numba compiles for in this process."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return describe(triple, features)


def has_avx512_bf16() -> bool:
    """Return whether the processor multiplies bfloat16 in 512-bit registers. Attention in bfloat16 needs that."""
    return target().lanes == _LINE and target().dot is not None
