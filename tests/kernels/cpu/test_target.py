"""The description of processors, and the environments that choose a smaller one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from sarathi_pp_kernels.cpu.simd.target import NOTHING, describe, has_avx512_bf16

from tests import processors
from tests.processors import environment_of, why_not

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        (X86, "+64bit,+avx512bf16,+avx512bw,+avx512f,-amx-bf16", (16, 32, True)),
        (X86, "+avx2,+avx512bf16,+avx512f,+fma", (16, 32, False)),
        (X86, "-avx512bf16,+avx512bw,+avx512f", (16, 32, False)),
        (X86, "+avx2,-avx512f,+fma", (8, 16, False)),
        (X86, "+avx,+avx2", (0, 0, False)),
        (X86, "", (0, 0, False)),
        (ARM, "+neon", (4, 32, False)),
        (ARM, "+bf16,+neon", (4, 32, True)),
        ("arm64-apple-darwin24.1.0", "", (4, 32, False)),
        ("riscv64-unknown-linux-gnu", "+v", (0, 0, False)),
    ],
)
def test_a_processor_is_known_by_all_its_features(triple: str, features: str, expected: tuple[int, int, bool]) -> None:
    target = describe(triple, features)
    assert (target.lanes, target.num_registers, target.dot is not None) == expected


def test_tiles_fill_registers_and_leave_some_for_a_line_of_each_panel() -> None:
    avx512, avx2, neon = describe(X86, "+avx512f"), describe(X86, "+avx2,+fma"), describe(ARM, "")
    assert [one.most_rows(one.num_sums, 1) for one in (avx512, avx2, neon)] == [24, 6, 4]
    assert (avx512.most_rows(28, 1), avx512.most_rows(24, 2)) == (28, 12)
    assert neon.most_rows(28, 1) == 6 and NOTHING.most_rows(0, 1) == 0


_SEEN = """
import torch
from sarathi_pp_kernels.cpu.simd.target import target, has_avx512_bf16
print(*target()[:2], has_avx512_bf16(), torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("avx2", "8 16 False AVX2"), ("avx512", "16 32 False AVX512")], ids=["avx2", "avx512"]
)
def test_kernels_and_torch_are_limited_alike(name: str, expected: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    environment = {**os.environ, **environment_of(name)}
    done = subprocess.run([sys.executable, "-c", _SEEN], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_machine_that_cannot_run_a_processors_instructions_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "avx avx2 fma f16c bmi1 bmi2 sse4_2 popcnt"
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: fpu {flags}\nbugs\t: none\n")
    monkeypatch.setattr(processors, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    assert why_not("avx2") is None
    assert why_not("avx512") == "this machine lacks avx512f, avx512bw, avx512cd, avx512dq, avx512vl"
    monkeypatch.setattr(processors.platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(why_not("avx2"))


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists the features")
@pytest.mark.skipif(bool(environment_of("avx2").keys() & os.environ.keys()), reason="the processor is limited already")
def test_this_processor_is_described_as_linux_does() -> None:
    has_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert has_avx512_bf16() == (has_bf16 and why_not("avx512") is None)
