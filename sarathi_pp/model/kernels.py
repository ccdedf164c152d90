"""Whether the Triton kernels of sarathi_pp_kernels are what runs on a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def has_kernels(device: torch.device) -> bool:
    """Triton comes with torch's builds for CUDA; where somebody took it out, torch's own operations remain."""
    return device.type == "cuda" and find_spec("triton") is not None
