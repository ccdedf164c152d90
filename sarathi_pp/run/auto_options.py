"""Options that a measured profile (--profile) sets if the user did not set them. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.estimate import DEVICE_SPEEDS, DeviceSpeed, estimate_cost
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import stage_seconds
from sarathi_pp.core.cost.sizing import inflight, saturation, typical_load
from sarathi_pp.core.partition import partition_by_time
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.dtypes import Dtypes
from sarathi_pp.model.shapes.layers import read_layer_shapes
from sarathi_pp.outputs.profile_file import read_profile

# Bits of a stored weight with its scale, by the bits of its code. MXFP4 has a scale of 8 bits per 32 weights. Scales of
# FP8 are few.
_STORED_BITS = {8: 8.0, 4: 4.25}


def tuned(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """Return the configuration with layer split, chunk size and inflight from the profile, unless the user set them.

    A configuration without a profile is returned unchanged.

    Raises:
        ConfigError: the profile was measured on another model.
        InputError: see `read_profile`.
        MissingError: see `read_profile`.
        PartitionError: see `partition_by_time`.
    """
    if config.profile is None:
        return config
    profile = read_profile(config.profile)
    found, wanted = (profile.num_layers, profile.hidden_size), (facts.num_layers, facts.hidden_size)
    if found != wanted:
        raise ConfigError(
            f"--profile {config.profile} was measured on {profile.model}, of {found[0]} layers and hidden size "
            f"{found[1]}; this model has {wanted[0]} layers and hidden size {wanted[1]}. Measure this model with "
            f"`sarathi-pp profile`"
        )
    # One stage needs no number: it has one microbatch in flight, and on a GPU one more that is issued ahead.
    own = inflight(profile, parse_policy(config.policy), config.stages) if config.stages > 1 else None
    return replace(
        config,
        layer_split=config.layer_split or _split(profile, config),
        chunk_size=config.chunk_size or _chunk_size(profile, config),
        inflight=config.inflight or own,
    )


def profile_mismatch(config: RunConfig, dtype: str) -> Iterator[str]:
    """Yield a warning for each difference between profile and run because of which the profile's times may be wrong.

    Args:
        dtype: float type in which the run computes.
    """
    if config.profile is None:
        return
    profile = read_profile(config.profile)
    if profile.dtype != dtype:
        yield f"--profile {config.profile} was measured in {profile.dtype}, and this run is in {dtype}"
    if profile.kv_cache_dtype != config.kv_cache_dtype:
        yield (
            f"--profile {config.profile} was measured with --kv-cache-dtype {profile.kv_cache_dtype}, and this run has "
            f"{config.kv_cache_dtype}"
        )
    if config.device not in ("auto", profile.device):
        yield f"--profile {config.profile} was measured on {profile.device}, and this run is on {config.device}"
    if profile.tensor_parallel_size != config.tensor_parallel_size:
        yield (
            f"--profile {config.profile} was measured with --tensor-parallel-size {profile.tensor_parallel_size}, and "
            f"this run has {config.tensor_parallel_size}"
        )


def estimated_cost(
    model_dir: Path,
    facts: ModelFacts,
    layers: Sequence[tuple[int, int]],
    *,
    dtypes: Dtypes,
    device: str,
    page_size: int,
    kv_cache_dtype: str = "auto",
    speed: DeviceSpeed | Sequence[DeviceSpeed] | None = None,
    shards: int = 1,
) -> CostModel:
    """Estimate the cost of a model's stages from its config.json, without a measurement.

    Args:
        facts: facts of the whole model.
        layers: one range of layers per stage, [first, end).
        dtypes: the float types of the run.
        page_size: tokens per KV page.
        kv_cache_dtype: that of a RunConfig or of a ResolvedRun.
        speed: speed of every stage's device, or one per stage; None to use typical speeds of this kind of device.
        shards: number of ranks that hold each stage together (tensor parallelism).
    """
    item_bytes, float8 = _item_bytes(dtypes.compute), kv_cache_dtype == "fp8"
    return estimate_cost(
        layers,
        shapes=read_layer_shapes(model_dir, facts),
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        weight_bytes=_weight_bytes(dtypes),
        compute_bytes=item_bytes,
        kv_bytes=1 if float8 else None,
        # On CPU, attention reads the codes, writes their values, and reads these.
        kv_traffic=1 + 2 * item_bytes if float8 and device == "cpu" else None,
        speed=speed or DEVICE_SPEEDS[device],
        page_size=page_size,
        shards=shards,
    )


def _weight_bytes(dtypes: Dtypes) -> float:
    """Return the bytes of memory that a product reads and writes for a weight.

    If weights are coded, all weights of layers count as coded, and every product as one of more than 16 rows, which
    expands them first.
    """
    item_bytes = _item_bytes(dtypes.weights)
    return item_bytes if dtypes.code_bits is None else _STORED_BITS[dtypes.code_bits] / 8 + 2 * item_bytes


def _item_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _split(profile: Profile, config: RunConfig) -> tuple[int, ...]:
    """Return the number of layers per stage with which, by the profile, all stages take about equal times."""
    load = typical_load(config.chunk_size or saturation(profile.cost))
    layers = partition_by_time(profile.num_layers, config.stages, stage_seconds(profile.cost, load, config.stages))
    return tuple(end - first for first, end in layers)


def _chunk_size(profile: Profile, config: RunConfig) -> int | None:
    """Return the smallest chunk size with which the stages reach about their best throughput (see `saturation`).

    Returns:
        The chunk size in tokens. None if the policy uses no chunk size, or only as an upper limit for its own choice.
    """
    policy = parse_policy(config.policy).kind
    return saturation(profile.cost) if policy.uses_chunk_size and not policy.chooses_chunk_size else None
