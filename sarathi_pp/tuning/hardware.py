"""The devices for which `plan` computes a plan: those of this host, or devices elsewhere that the user describes.

--hosts 2 --devices 4 --card rtx-4090       8 equal devices, host by host
--device-memory 80GiB,24GiB,24GiB           one device per size, in the order of the stages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.core.cost.estimate import DEVICE_SPEEDS, DeviceSpeed
from sarathi_pp.errors import ConfigError
from sarathi_pp.process.host import MemoryPool
from sarathi_pp.stages.capacity import DeviceMemory

# Memory of CUDA's context, kernels and NCCL's buffers, which torch's allocator does not count. Assumed, not measured.
CONTEXT_BYTES = 512 << 20

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of a machine elsewhere.

    Attributes:
        title: name for the user.
        known: the speed is that of a known card, and not an assumed one.
    """

    title: str
    memory_bytes: int
    speed: DeviceSpeed
    known: bool

    def memory(self, index: int) -> DeviceMemory:
        """Return the memory of this device before a run loads weights.

        Args:
            index: index of the device. It gives the device's memory an id of its own.
        """
        free = max(0, self.memory_bytes - CONTEXT_BYTES)
        pool = MemoryPool(f"device {index}", f"the memory of device {index}, {self.title}", free)
        return DeviceMemory("cuda", (pool,), self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices elsewhere, as the user describes them. Without cards and memory, a plan is for this host.

    Attributes:
        hosts: number of hosts.
        devices: number of devices per host. None: one per size or card, or one per rank.
        memory: sizes in bytes: one for all devices, one per device of a host, or one per device.
        cards: names of cards in CARDS: one for all devices, one per device of a host, or one per device.
    """

    hosts: int = 1
    devices: int | None = None
    memory: tuple[int, ...] = ()
    cards: tuple[str, ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.memory or self.cards)

    def require_complete(self) -> None:
        """Raise ConfigError if the number of devices is given without their memory."""
        if not self.is_elsewhere and (self.devices is not None or self.hosts > 1):
            option = "--devices" if self.devices is not None else "--hosts"
            raise ConfigError(f"{option} needs --card or --device-memory, which give the memory of the devices")

    def list_devices(self, num_ranks: int | None) -> list[Device]:
        """Return all devices, host by host.

        Args:
            num_ranks: number of ranks of the run; None if the run uses all devices.

        Raises:
            ConfigError: the numbers of devices, sizes and cards contradict each other.
        """
        described = max(len(self.memory), len(self.cards))
        per_host = self.devices
        if per_host is None:
            wanted = described if described > 1 else (num_ranks or self.hosts)
            per_host = -(-wanted // self.hosts)
        total = per_host * self.hosts
        names = _for_each("--card", self.cards, per_host, total)
        sizes = _for_each("--device-memory", self.memory, per_host, total)
        devices = []
        for index in range(total):
            card = CARDS[names[index]] if names else None
            size = sizes[index] if sizes else (card.memory_bytes if card else 0)
            title = card.title if card else f"a GPU with {size / 2**30:.3g} GiB"
            speed = card.speed if card else DEVICE_SPEEDS["cuda"]
            devices.append(Device(title, size, speed, known=card is not None))
        return devices


def local_memories(device: torch.device, num_ranks: int) -> tuple[DeviceMemory, ...]:
    """Return the memory of each rank, if all ranks run on this host.

    Ranks on CPUs share the memory of the host. On GPUs, each rank is assumed to have a GPU like `device` for itself.
    """
    memory = DeviceMemory.of(device)
    if memory.kind != "cuda":
        return (memory,) * num_ranks
    (pool,) = memory.pools
    return tuple(replace(memory, pools=(replace(pool, id=f"{pool.id} {rank}"),)) for rank in range(num_ranks))


def choose_stages(devices: Sequence[Device], shards: int, num_layers: int) -> int:
    """Return the number of stages that uses all devices, at most one stage per layer.

    Args:
        shards: number of devices per stage, with tensor parallelism.

    Raises:
        ConfigError: the devices cannot be divided into groups of `shards`.
    """
    if len(devices) % shards:
        raise ConfigError(
            f"--tensor-parallel-size {shards} does not divide {len(devices)} devices; set --stages to use fewer devices"
        )
    return min(num_layers, len(devices) // shards)


def _for_each(option: str, values: Sequence[_Value], per_host: int, total: int) -> list[_Value]:
    """Return one value per device. A single value counts for all devices, and the values of one host for every host.

    Args:
        option: option that gave the values, for the error message.
        values: one value, one per device of a host, or one per device; may be empty.
        per_host: number of devices of a host.
        total: number of all devices.

    Raises:
        ConfigError: another number of values.
    """
    if len(values) in (0, 1):
        return list(values) * total
    if len(values) == total:
        return list(values)
    if len(values) == per_host:
        return list(values) * (total // per_host)
    raise ConfigError(
        f"{option} lists {len(values)} devices, and there are {total}; give one value for all devices, {per_host} "
        f"values for the devices of each host, or {total} values"
    )
