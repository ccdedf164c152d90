"""The files in inside/ run in processes with simulated GPUs, since these replace torch's own permanently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.machine import patient
from tests.mockgpu.processes import with_gpus

# transformers' loader has no argument of its own for a device, so its oldest release is tested as well.
MARKS = {"check_stage": pytest.mark.oldest, "check_contest": pytest.mark.full}
CHECKS = sorted(Path(__file__).with_name("inside").glob("check_*.py"))


@pytest.mark.parametrize(
    "checks",
    [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, ())) for path in CHECKS],
)
def test_with_a_gpu(checks: Path, tmp_path: Path) -> None:
    # Results computed during a graph's capture are garbage, as on a real device.
    garbage = ("-W", "ignore::RuntimeWarning")
    own = ("-p", "no:cacheprovider", "-o", "python_files=check_*.py", *garbage)
    command = (sys.executable, "-m", "pytest", "-q", *own, str(checks))
    hazards = tmp_path / "hazards"
    done = subprocess.run(
        command, cwd=ROOT, env=with_gpus(2, hazards), capture_output=True, text=True, timeout=patient(280)
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert not hazards.exists(), hazards.read_text()
