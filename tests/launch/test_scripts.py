"""The files of launch/: clean shell, and each environment variable explained in one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.missing import missing

LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
STARTERS = [LAUNCH / name for name in ("local.sh", "multinode.sh", "slurm.sbatch")]
# Variables that others set: Slurm, bash.
GIVEN = re.compile(r"SLURM\w*|BASH_SOURCE|PET_")


def unexplained(text: str) -> set[str]:
    """Return variables that are read or passed on and have no line `#   NAME  what it is`."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    read = {*re.findall(r"\$\{?([A-Z][A-Z0-9_]+)\b", code), *re.findall(r"\b([A-Z][A-Z0-9_]+)=", code)}
    explained = {*re.findall(r"^#   ([A-Z][A-Z0-9_]+) +\S", text, re.MULTILINE)}
    internal = {"NNODES", "MASTER_ADDR", "RDZV_ID"} if "SLURM_JOB_ID" in text else set()
    handed_on = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}  # INTERFACE, under the libraries' names
    return {name for name in read - explained - internal - handed_on if not GIVEN.fullmatch(name)}


@pytest.mark.parametrize("script", STARTERS, ids=lambda path: path.name)
def test_every_variable_is_explained(script: Path) -> None:
    assert not unexplained(script.read_text())


def test_a_variable_without_a_line_is_found() -> None:
    assert unexplained('#   ONE  is explained\necho "${ONE:-}" "$TWO"\nexport THREE=3\n') == {"TWO", "THREE"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    found = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if not Path(found).exists():
        missing("no shellcheck here")
    checked = subprocess.run(
        (found, "-S", "warning", "-s", "bash", str(script)), cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
