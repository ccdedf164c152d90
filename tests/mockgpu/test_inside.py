"""The files in inside/ run in processes with simulated GPUs, since these replace torch's own permanently."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests import thinning
from tests.commands.processes import ROOT
from tests.machine import patient
from tests.mockgpu.processes import with_gpus

INSIDE = Path(__file__).with_name("inside")
# Files that share a process: starting one takes four seconds.
GROUPS = (
    ("check_stage",),
    ("check_working_memory", "check_machine", "check_nccl_channels"),
    ("check_bench", "check_float8"),
    ("check_contest",),
)
# transformers' loader has no argument of its own for a device, so its oldest release is tested as well.
MARKS = {"check_stage": pytest.mark.oldest, "check_contest": pytest.mark.full}


def test_every_file_is_in_one_group() -> None:
    assert sorted(itertools.chain(*GROUPS)) == sorted(path.stem for path in INSIDE.glob("check_*.py"))


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id="-".join(names), marks=MARKS.get(names[0], ())) for names in GROUPS],
)
def test_with_a_gpu(names: tuple[str, ...], tmp_path: Path) -> None:
    # Results computed during a graph's capture are garbage, as on a real device.
    garbage = ("-W", "ignore::RuntimeWarning")
    own = ("-p", "no:cacheprovider", "-o", "python_files=check_*.py", *garbage)
    checks = [str(INSIDE / f"{name}.py") for name in names]
    command = (sys.executable, "-m", "pytest", "-q", *["--full"] * thinning.full, *own, *checks)
    hazards = tmp_path / "hazards"
    done = subprocess.run(
        command, cwd=ROOT, env=with_gpus(2, hazards), capture_output=True, text=True, timeout=patient(280)
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert not hazards.exists(), hazards.read_text()
