"""The record of a measurement: its commit, command and machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Record:
    """A record. Make it with `begin` before the measurement, because the tree may change while a program runs."""

    commit: str
    command: str
    machine: str

    @classmethod
    def begin(cls) -> Self:
        arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
        return cls(describe_commit(), f"python examples/benchmarks/{shlex.join(arguments)}", describe_machine())

    def write(self, output: Path | None, figures: Mapping[str, Any], *, indent: int | None = 1) -> dict[str, Any]:
        """Write the record and the figures as one JSON document, and return it.

        Args:
            output: None to write no file.
        """
        document = {**asdict(self), **figures}
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(document, indent=indent) + "\n")
        return document


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def describe_commit() -> str:
    """Return the commit of this tree, with `-dirty` if tracked files differ from it. Empty outside of git.

    Changes in docs/benchmarks do not count, because one measurement after another writes its figures there.
    """
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)docs/benchmarks")
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")


def describe_machine() -> str:
    software = f"{platform.platform()}, Python {platform.python_version()}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {describe_cpu()}, {software}"


def describe_cpu() -> str:
    """Return the processor's name from /proc/cpuinfo, or what the platform module knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
