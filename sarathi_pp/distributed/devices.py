"""Choose the device of a rank, and describe it to the other ranks."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about a rank's device that other ranks need."""

    host: str  # id of the rank's host, see `host_id`
    gpu: str | None  # uuid of the GPU; None on CPU
    nccl: bool  # True if the rank's torch has NCCL
    arithmetic: str = ""  # a hash: two CPUs with equal hashes compute equal products, bit for bit


def choose_device(wish: str, env: RankEnvironment) -> torch.device:
    """Return the device of this rank. If a host has more ranks than GPUs, ranks share GPUs.

    Args:
        wish: the user's choice: "auto", "cpu" or "cuda". "auto" takes a GPU if torch finds one.

    Raises:
        ConfigError: the user wants "cuda", and torch finds no CUDA device.
    """
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wish == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", env.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def describe_device(device: torch.device, host: str, *, nccl: bool) -> DeviceInfo:
    """Return the facts about this rank's device that other ranks need.

    Args:
        host: id of this host, see `host_id`.
        nccl: True if this rank's torch has NCCL.
    """
    if device.type != "cuda":
        return DeviceInfo(host, None, nccl=False, arithmetic=_arithmetic())
    return DeviceInfo(host, str(torch.cuda.get_device_properties(device).uuid), nccl)


def _arithmetic() -> str:
    """Return a hash of everything that selects a CPU's kernels: its instructions, its threads and numba's version."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    features = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    numba = version("numba") if find_spec("numba") is not None else ""
    capability = torch.backends.cpu.get_cpu_capability()
    told = f"{platform.machine()} {features} {capability} {torch.get_num_threads()} {numba}"
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
