"""The times and the memory from which `plan` computes a plan. Times come from a profile, or are estimated for a device.

The device may be here or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.estimate import DeviceSpeed
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.partition import Layers, partition
from sarathi_pp.distributed.devices import choose_device
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import ConfigError
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.run.auto_options import estimated_cost, tuned
from sarathi_pp.stages.capacity import DeviceMemory, stage_state_bytes
from sarathi_pp.tuning.fitting import Rooms
from sarathi_pp.tuning.hardware import Device, local_memories
from sarathi_pp.tuning.model_memory import ModelMemory, PlannedModel

# The link that is assumed between stages: gloo on one host, or through the memory of the hosts.
_LINK_LATENCY_S = 1e-3
_LINK_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Basis:
    """The times and the memory for a plan.

    Attributes:
        source: origin of the times, "profile" or "estimate".
        profile: times of the stages for one layer split. Its number of KV pages is not used.
        device: "cpu" or "cuda".
        cost_of: returns the cost model of the same stages with another layer split.
        rooms: memory of the stages' devices.
        devices: device of each rank; empty if the plan is for this host.
    """

    source: str
    profile: Profile
    device: str
    cost_of: Callable[[Layers], CostModel]
    rooms: Rooms
    devices: Sequence[Device]


def measured_basis(model: PlannedModel, config: RunConfig, devices: Sequence[Device]) -> Basis:
    """Return a basis whose times come from the run's profile.

    The KV cache is that of the stages in the profile, unless the user has described devices.

    Args:
        devices: devices elsewhere that the user has described; empty for this host.

    Raises:
        ConfigError: the profile belongs to another model.
        MissingError, InputError: see `read_profile`.
    """
    assert config.profile is not None
    tuned(config, model.facts)  # refuses the profile of another model
    profile = read_profile(config.profile)
    device = "cuda" if devices else profile.device
    memory, stages = ModelMemory.of(model, config, device, 1), profile.cost.stages
    most = max(partition(model.facts.num_layers, len(stages)), key=lambda layers: layers[1] - layers[0])
    sizes = [(stage.layers, stage.page_bytes) for stage in stages]
    if not any(size for _, size in sizes):  # a profile that was written manually may lack the size of a page
        sizes = [(most, memory.with_options(kv_cache_dtype=profile.kv_cache_dtype).page_bytes(most))]
    kv_bytes = max(
        profile.pages * size + stage_state_bytes(memory.rank_facts, layers, profile.max_num_seqs, memory.dtype)
        for layers, size in sizes
    )
    rooms = Rooms(config, _memories(config, devices), kv_bytes)
    return Basis("profile", profile, device, lambda layers: repartition(profile.cost, layers), rooms, devices)


def estimated_basis(model: PlannedModel, config: RunConfig, devices: Sequence[Device]) -> Basis:
    """Return a basis whose times are estimated from the model's shape. The memory is that of the devices or this host.

    Args:
        devices: devices elsewhere that the user has described; empty for this host.

    Raises:
        ConfigError: the option is --device cuda, and this host has no GPU.
    """
    facts, shards = model.facts, config.tensor_parallel_size
    if config.device == "cuda" and not devices and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device on this host; name a card with --card")
    device = torch.device("cuda") if devices else choose_device(config.device, RankEnvironment())
    memories = _memories(config, devices) if devices else local_memories(device, config.stages * shards)
    memory = ModelMemory.of(model, config, device.type, 1)

    def cost_of(layers: Layers) -> CostModel:
        return estimated_cost(
            model.directory,
            facts,
            layers,
            dtypes=memory.dtypes,
            device=device.type,
            page_size=memory.page_size,
            kv_cache_dtype=config.kv_cache_dtype,
            speed=_slowest_speeds(devices, len(layers), shards) if devices else None,
            shards=shards,
        )

    profile = Profile(
        model=config.model,
        device=device.type,
        dtype=memory.dtypes.compute,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        cost=cost_of(partition(facts.num_layers, config.stages)),
        link_latency_s=_LINK_LATENCY_S,
        link_bytes_per_s=_LINK_BYTES_PER_S,
        jitter_cv=0.0,
        pages=1,
        max_num_seqs=1,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return Basis("estimate", profile, device.type, cost_of, Rooms(config, memories), devices)


def _memories(config: RunConfig, devices: Sequence[Device]) -> tuple[DeviceMemory, ...]:
    return tuple(
        device.memory(index) for index, device in enumerate(devices[: config.stages * config.tensor_parallel_size])
    )


def _slowest_speeds(devices: Sequence[Device], num_stages: int, shards: int) -> list[DeviceSpeed]:
    """Return the speed of each stage: that of its device with the lowest FLOP/s."""
    groups = (devices[start : start + shards] for start in range(0, num_stages * shards, shards))
    return [min((device.speed for device in group), key=lambda speed: speed.flops[2]) for group in groups]
