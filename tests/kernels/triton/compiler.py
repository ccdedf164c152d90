"""Programs that compile kernels, in processes in which kernels do not belong to the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.commands.processes import ROOT, environment
from tests.machine import patient

# The program sets the variable itself: with it, a process would start cold (tests/warm).
_CACHE = 'import os, sys\nos.environ["TRITON_CACHE_DIR"] = sys.argv.pop()\n'


def run_compiler(folder: Path, program: str, *arguments: str) -> str:
    """Return what the program prints.

    Args:
        folder: an empty folder for the program and for Triton's files.
    """
    script = folder / "program.py"
    script.write_text(_CACHE + program)
    command = (sys.executable, "-P", str(script), *arguments, str(folder / "cache"))
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=patient(280))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
