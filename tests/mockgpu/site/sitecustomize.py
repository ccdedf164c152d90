"""Simulated GPUs for every Python process with this file on its path and MOCK_GPUS in its environment."""

import os
import sys
from pathlib import Path

if "MOCK_GPUS" in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[1:1] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "kernels")]
    from tests.mockgpu.install import install

    install()
