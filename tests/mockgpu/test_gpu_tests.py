"""The tests that need a GPU, in small sizes on a simulated one. So they still run when a GPU comes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT, environment
from tests.gpu import test_pipelines as pipelines
from tests.machine import patient
from tests.mockgpu.processes import with_gpus

GPU_TESTS = ROOT / "tests" / "gpu"
COMMAND = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")


@pytest.mark.timeout(300)
def test_they_pass_on_a_simulated_gpu(tmp_path: Path) -> None:
    hazards = tmp_path / "hazards"
    variables = {**with_gpus(1, hazards), "TESTS_GPU_TINY": "1"}
    command = (*COMMAND, str(GPU_TESTS), f"--ignore={GPU_TESTS / 'test_pipelines.py'}")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=patient(280))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert not hazards.exists(), hazards.read_text()
    files = len(list(GPU_TESTS.glob("test_*.py"))) - 1
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= files and "skipped" not in done.stdout, done.stdout


def test_they_are_skipped_without_a_gpu() -> None:
    command = (*COMMAND, str(GPU_TESTS / "test_rows.py"))
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=patient(90))
    assert done.returncode == 0, done.stdout
    assert "no CUDA device" in done.stdout and "passed" not in done.stdout


def test_pipelines_would_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both sides run on the CPU here. Other tests have pipelines on simulated GPUs, which are slow."""
    monkeypatch.setattr(pipelines, "DEVICE", "cpu")
    monkeypatch.setattr(pipelines, "PROMPTS", ["2+2=", "30+4="])
    monkeypatch.setattr(pipelines, "NEW_TOKENS", 2)
    expected = pipelines.answers(tmp_path / "expected", "--device", "cpu", "--attention", "sdpa")
    pipelines.test_tokens_are_those_of_the_cpu(("--stages", "2"), expected, tmp_path)
    with pytest.raises(AssertionError):
        pipelines.test_tokens_are_those_of_the_cpu((), [(0, 0), *expected[1:]], tmp_path / "2")
