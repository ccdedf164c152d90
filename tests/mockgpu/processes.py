"""Processes that have simulated GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from tests.commands.processes import environment

SITE = Path(__file__).with_name("site")


def with_gpus(count: int, hazards: Path) -> dict[str, str]:
    """Return an environment with GPUs. hazards: a file that exists afterwards if a real device would have failed."""
    inherited = environment()
    paths = os.pathsep.join((str(SITE), inherited["PYTHONPATH"]))
    return {**inherited, "MOCK_GPUS": str(count), "MOCK_GPU_HAZARDS": str(hazards), "PYTHONPATH": paths}
