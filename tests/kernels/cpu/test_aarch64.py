"""The machine code of products and attention for AArch64, which no test runs: only SIMD instructions, in registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import llvmlite.binding as llvm

from tests import thinning

ROOT = Path(__file__).parents[3]
TRIPLE = "aarch64-unknown-linux-gnu"
CORES = {"neoverse-n1": "+neon", "neoverse-v2": "+bf16,+neon"}
# By default, a core without products of bfloat16 compiles two kernels.
OTHERS = pytest.mark.full
# The heights of tiles, each of which has a loop: with one panel; in float32 also near ones, in bfloat16 high ones.
NARROW = "multiply_float_bf16", "multiply_float_fp16"
FLOAT32 = "multiply_float", *NARROW
KERNELS = {
    "neoverse-n1": (*(FLOAT32 if thinning.full else FLOAT32[:1]), "attention_float"),
    "neoverse-v2": (*FLOAT32, "multiply_bf16", "attention_float"),
}
HEIGHTS = {"multiply_float": (2, 4, 2, 4), **dict.fromkeys(NARROW, (2, 4)), "multiply_bf16": (2, 4, 6)}


@cache
def compiled_for(core: str) -> Any:
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(TRIPLE)
    except RuntimeError as error:
        pytest.skip(f"this llvmlite has no code generator for AArch64: {error}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment |= {"NUMBA_CPU_NAME": core, "NUMBA_CPU_FEATURES": CORES[core]}
    command = [sys.executable, "-m", "tests.kernels.cpu.assembly", TRIPLE, *KERNELS[core]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def product_loops(assembly: str) -> list[list[str]]:
    """Return the instructions of each innermost loop that multiplies."""
    loops = []
    for name, body in re.findall(r"^(\.LBB\w+):[^\n]*\n((?:[^.\n][^\n]*\n)*)", assembly, re.MULTILINE):
        lines = [line.split("//")[0].strip() for line in body.splitlines()]
        ends = [at for at, line in enumerate(lines) if re.match(rf"(b\.|cb|tb).*{re.escape(name)}$", line)]
        if ends and any(line.startswith(("fmla", "bfdot", "fmul", "fmadd")) for line in lines[: ends[-1]]):
            loops.append(lines[: ends[-1]])
    return loops


@pytest.mark.parametrize(("core", "has_dot"), [("neoverse-n1", False), ("neoverse-v2", True)])
def test_a_core_has_32_registers_of_four_numbers(core: str, has_dot: bool) -> None:
    target = compiled_for(core)["target"]
    assert (target["lanes"], target["num_registers"], target["dot"] is not None) == (4, 32, has_dot)


@pytest.mark.parametrize(
    ("core", "kernel"),
    [
        ("neoverse-n1", "multiply_float"),
        *(pytest.param("neoverse-n1", kernel, marks=OTHERS) for kernel in NARROW),
        *(("neoverse-v2", kernel) for kernel in (*FLOAT32, "multiply_bf16")),
    ],
)
def test_tiles_are_multiplied_in_vector_registers(core: str, kernel: str) -> None:
    loops = product_loops(compiled_for(core)["assembly"][kernel])
    assert len(loops) == len(HEIGHTS[kernel])
    for loop in loops:
        product = r"bfdot\tv\d+\.4s, v\d+\.8h, " if kernel == "multiply_bf16" else r"fmla\tv\d+\.4s, v\d+\.4s, "
        multiplied = [line for line in loop if re.match(product, line)]
        others = [line for line in loop if re.match(r"f\w+\t[hsd]\d", line)]
        assert len(multiplied) >= 8 and others == [], "floating point, but not a vector at a time"
        assert [line for line in loop if re.search(r"\[?\bsp\b", line)] == [], "registers are stored in memory"
        assert any(line.startswith("prfm") for line in loop)
    near = [any("pldl1keep" in line for line in loop) for loop in loops]
    assert sum(near) == (2 if kernel == "multiply_float" else 0), "the others prefetch to the second-level cache"


@pytest.mark.parametrize("core", ["neoverse-n1", "neoverse-v2"])
def test_attention_is_computed_in_vector_registers(core: str) -> None:
    """Loops with products: six rows with a panel, twice; one to four heads with values; one and two heads with keys.

    Other loops compute powers, or scale sums.
    """
    loops = product_loops(compiled_for(core)["assembly"]["attention_float"])
    products = [loop for loop in loops if sum(line.startswith("fmla") for line in loop) >= 4]
    assert len(products) >= 8
    for loop in products:
        assert [line for line in loop if re.match(r"(fmadd|fmul|fadd)\t[hsd]\d", line)] == []
        assert [line for line in loop if re.search(r"\[?\bsp\b", line)] == [], "registers are stored in memory"
    counts = [sum(line.startswith("fmla") for line in loop) for loop in products]
    assert counts.count(24) >= 2, "six rows by four registers of a line"
    assert 32 in counts, "two heads by four channels by four registers of a line of keys"


def test_each_line_of_a_panel_is_loaded_once_for_all_rows() -> None:
    """Four rows by four registers of a line: 16 products for each number of x, and two loads of two registers."""
    loops = product_loops(compiled_for("neoverse-n1")["assembly"]["multiply_float"])
    highest = max(loops, key=lambda loop: len({line.split()[1] for line in loop if line.startswith("fmla")}))
    assert sum(line.startswith("fmla") for line in highest) == 16
    assert sum(bool(re.match(r"ldp\tq", line)) for line in highest) == 2
