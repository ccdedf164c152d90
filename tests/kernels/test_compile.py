"""Every kernel compiles for Ampere and for Hopper, without a GPU: the interpreter takes what the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own: here kernels are the interpreter's. A type is a pointer's, a number's, or the value of a
# constant; None stands for an argument that is not given.
_COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from sarathi_pp_kernels import gate, norm, rotary, sampling

def sources(dtype):
    row = "*" + dtype
    yield gate._gate_rows, (row, row, "i32", 1024), {}
    for added in (row, None):
        yield norm._norm_rows, (row, added, row, row, "fp32", 4096, 4096), {"num_warps": 8}
    for gain in (row, None):
        heads = (row, row, row, "*i64", "*i64", row, row, gain, gain, "fp32", "i32", "i32", 4, 4, 48, 64)
        yield rotary._rotate_rows, heads, {"num_warps": 1, "enable_fp_fusion": False}
    eight = {"num_warps": 8}
    yield sampling._find_peaks, (row, "*i64", "*fp32", 128256, 4096), eight
    yield sampling._weigh, (row, "*fp32", "*i64", "*fp64", "*fp64", 128256, 4096), eight
    yield sampling._invert, ("*fp64", "*i64", "*fp64", 128256, 4096), eight

target = GPUTarget("cuda", int(sys.argv[1]), 32)
for dtype in ("bf16", "fp32"):
    for kernel, types, options in sources(dtype):
        given = dict(zip(kernel.arg_names, types, strict=True))
        constants = {name: kind for name, kind in given.items() if not isinstance(kind, str)}
        signature = {name: "constexpr" if name in constants else kind for name, kind in given.items()}
        source = triton.compiler.ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.asm["cubin"], kernel
        if options.get("enable_fp_fusion") is False:
            # Of bfloat16 there are: Ampere multiplies so, and adds a zero.
            fused = [line for line in compiled.asm["ptx"].splitlines() if "fma.rn.f32" in line]
            assert not fused, f"products are not rounded before they are added: {fused[0]}"
        print(kernel.__name__)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(ROOT / "kernels"), environment.get("PYTHONPATH", "")))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = (sys.executable, "-P", "-c", _COMPILE, str(capability))
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    found = {*run.stdout.split()}
    assert found == {"_gate_rows", "_norm_rows", "_rotate_rows", "_find_peaks", "_weigh", "_invert"}
