"""Where a rank computes, as the others need to know it."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from sarathi_pp.distributed.environment import Place
from sarathi_pp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank computes. gpu: its uuid, None on CPU. nccl: whether its torch has it. arithmetic: where this is the
    same, the same product has the same bits.
    """

    host: str
    gpu: str | None
    nccl: bool
    arithmetic: str = ""


def choose_device(wish: str, place: Place) -> torch.device:
    """The device of this rank. Ranks share a GPU where there are more of them than GPUs."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wish == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def stand(device: torch.device, host: str, *, nccl: bool) -> Standing:
    """Of a rank that computes on this device. nccl: whether its torch has it."""
    if device.type != "cuda":
        return Standing(host, None, nccl=False, arithmetic=_arithmetic())
    return Standing(host, str(torch.cuda.get_device_properties(device).uuid), nccl)


def _arithmetic() -> str:
    """What a CPU's kernels are chosen by: its instructions, threads, and numba, with which some are compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    features = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    numba = version("numba") if find_spec("numba") is not None else ""
    capability = torch.backends.cpu.get_cpu_capability()
    told = f"{platform.machine()} {features} {capability} {torch.get_num_threads()} {numba}"
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
