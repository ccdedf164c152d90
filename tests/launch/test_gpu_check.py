"""launch/gpu_check.sh and the tier gpu of launch/test.sh: what they run, with a Python that only records its calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.machine import patient

STAND_IN = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *"$FAILS"*) exit 1 ;;
    "- "*) echo "3 0" ;;
esac
"""


def run(folder: Path, script: str, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a script. Return its outcome, and the calls of Python."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls.touch()
    own = {"PYTHON": str(python), "CALLS": str(calls), "OUT": str(folder / "out"), "FAILS": "nothing", **variables}
    command = ("bash", str(ROOT / "launch" / script), *arguments)
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, timeout=patient(60), check=False
    )
    return done, calls.read_text()


def test_the_device_then_the_tests_then_the_measurements(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", "rates", "exact", BUDGET_S="300")
    assert done.returncode == 0, done.stdout + done.stderr
    places = [calls.index(call) for call in ("sarathi_pp doctor", "-m pytest -q", "sarathi_pp bench gpu --budget ")]
    assert places == sorted(places) and "tests/gpu\n" in calls
    assert calls.endswith(f"--output {tmp_path}/out/gpu.json --parts rates,exact\n")
    budget_s = int(calls.split("--budget ")[1].split()[0])
    assert 200 < budget_s <= 290, "the rest of the time, and some seconds to end"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "triton.tgz"}


def test_without_tests_and_names_all_that_is_missing_is_measured(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", TESTS_S="0")
    assert done.returncode == 0 and "-m pytest" not in calls and "--parts" not in calls


@pytest.mark.parametrize("fails", ["-m pytest", "bench gpu"])
def test_what_fails_gives_1_and_the_others_run(fails: str, tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", FAILS=fails)
    assert done.returncode == 1 and "bench gpu" in calls and "-m pytest" in calls


def test_a_python_of_ones_own_is_for_the_tests_on_a_gpu(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "test.sh", "gpu")
    assert done.returncode == 0 and "3 passed, 0 failed" in done.stdout and "-m pytest" in calls
    done, calls = run(tmp_path, "test.sh", "pure")
    assert done.returncode == 2 and "PYTHON is for the tier gpu only" in done.stderr
    done, calls = run(tmp_path, "test.sh", "gpu", FAILS="is_available")
    assert "skipped: no CUDA device" in done.stdout
