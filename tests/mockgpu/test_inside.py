"""What is checked in processes with simulated GPUs, torch's own being replaced for good: the files in inside/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.machine import patient
from tests.mockgpu.processes import with_gpus

# transformers' loader is told of a device by no argument of its own, so the oldest one is tried as well.
MARKS = {"check_stage": pytest.mark.oldest, "check_contest": pytest.mark.full}
CHECKS = sorted(Path(__file__).with_name("inside").glob("check_*.py"))


@pytest.mark.parametrize(
    "checks",
    [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, ())) for path in CHECKS],
)
def test_with_a_gpu(checks: Path, tmp_path: Path) -> None:
    # What is computed while a graph is captured is garbage, here as there.
    garbage = ("-W", "ignore::RuntimeWarning")
    own = ("-p", "no:cacheprovider", "-o", "python_files=check_*.py", *garbage)
    command = (sys.executable, "-m", "pytest", "-q", *own, str(checks))
    done = subprocess.run(
        command, cwd=ROOT, env=with_gpus(2, tmp_path / "hazards"), capture_output=True, text=True, timeout=patient(280)
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
