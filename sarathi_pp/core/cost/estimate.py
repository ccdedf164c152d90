"""A cost model from a model's shape and a device's speed, for use before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost.model import CostModel, StageCost


@dataclass(frozen=True, slots=True)
class SumSpeed:
    """The time to add up a tensor over the T shards of a stage (the ranks that compute it together).

    A sum takes a base time and the time of its hops. Each hop sends the tensor, or a part of it, to another shard:

        ring      2 (T-1) hops of a T-th of the tensor
        gathers   T-1 hops of the whole tensor, and each shard adds up all of it

    Attributes:
        base_s: time of a sum without its hops, in seconds.
        hop_s: time of each hop without its bytes, in seconds.
        bytes_per_s: bytes per second in one direction between two shards, adding included.
        gathers: True for gathers, False for a ring.
    """

    base_s: float
    hop_s: float
    bytes_per_s: float
    gathers: bool = False

    def fixed_s(self, shards: int) -> float:
        """Return the seconds of a sum that do not depend on its size."""
        return self.base_s + self._hops(shards) * self.hop_s if shards > 1 else 0.0

    def byte_s(self, shards: int) -> float:
        """Return the seconds of a sum per byte of its tensor."""
        part = 1 if self.gathers else 1 / shards
        return self._hops(shards) * part / self.bytes_per_s

    def _hops(self, shards: int) -> int:
        return shards - 1 if self.gathers else 2 * (shards - 1)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of one stage's device.

    Attributes:
        flops: operations per second of linear layers, by bytes per weight (2 or 4).
        bytes_per_s: bytes read from the device's memory per second.
        tile: number of tokens that linear layers compute in one step.
        layer_s: seconds to launch a layer's operations, whatever they compute.
        attention_share: share of `flops` that attention reaches.
        hidden_share: share of the time of reading weights that overlaps with computing.
        sums: speed of sums over the devices that compute a stage together; None if each stage has one device.
    """

    flops: Mapping[int, float]
    bytes_per_s: float
    tile: int
    layer_s: float
    attention_share: float = 0.25
    hidden_share: float = 1.0
    sums: SumSpeed | None = None


# cpu: one AVX512-BF16 core of a shared server, as measured on the model of examples/benchmarks/measure_300m.py. On a
# Zen 5, 0.8 of the time of reading weights overlapped with computing (0.5 with the 254M model).
# cuda: an A100-80GB at 60 % of its 312 TFLOP/s (19.5 in float32) and 80 % of its 2.04 TB/s. Layers are launched one
# operation at a time.
# Sums on cpu: as wire/shard_group.py makes them, measured with gloo over loopback on two cores that other programs used
# too. The figures are from the fastest tenth of 60 (2 shards: 0.38 ms, and 1.3 ns per byte; 3 shards: 0.7 to 1.1 ms,
# and 3.7 ns).
# Sums on cuda: NCCL's own model of a ring over NVLink, nothing measured here (src/graph/tuning.cc of 2.8: 3.6 us and
# 0.47 us per hop in its low-latency protocol, at most 235 GB/s on an A100).
DEVICE_SPEEDS: Mapping[str, DeviceSpeed] = {
    "cpu": DeviceSpeed(
        {2: 3e11, 4: 1e11}, 1.5e10, 1, 2e-4, hidden_share=0.8, sums=SumSpeed(0.0, 4e-4, 7.5e8, gathers=True)
    ),
    "cuda": DeviceSpeed({2: 1.9e14, 4: 1.2e13}, 1.6e12, 128, 2e-4, sums=SumSpeed(3.6e-6, 0.47e-6, 2.35e11)),
}


def estimate_cost(
    layers: Sequence[tuple[int, int]],
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    weight_bytes: int,
    compute_bytes: int | None = None,
    speed: DeviceSpeed | Sequence[DeviceSpeed],
    mlp_matrices: int = 3,
    num_experts: int = 1,
    experts_per_token: int = 1,
    page_size: int = 16,
    shards: int = 1,
) -> CostModel:
    """Return a cost model from a model's shape. It shows which option is faster; its times may be wrong by a factor.

        h, d, i   hidden_size, head_dim, intermediate_size
        w         weights of a layer: h*(heads + 2*kv_heads)*d + heads*d*h + experts * mlp_matrices*h*i
        w_active  the part of w that one token uses

        a0   launches, and reading that is not hidden    layers * (layer_s + (1 - hidden) * w * bytes / bandwidth)
        a1   a tile of tokens, 2 FLOP per weight         layers * 2 * w_active * tile / flops
        ridge   every weight is read once; the hidden    hidden * (w * bytes / bandwidth) / (2 * w_active / flops)
                part takes as long as this many tokens
        a2   4 FLOP per channel, query and key           layers * 4 * heads*d / (flops * share)
        a3   a key and a value are read                  layers * 2 * kv_heads*d * bytes / bandwidth
        LM head   its weights are read with a0 of the last stage, and a row costs 2 * h * vocabulary / flops. The two
                  times are added up: with few rows, reading does not overlap with computing.

    Each shard has a T-th of weights, heads and keys, and all of the LM head. With several shards, every layer adds up
    hidden states over them twice, after attention and after the MLP. The fixed time of these sums is in a0, and the
    time of their bytes is in a1.

    The ridge is in whole tiles, and the smallest of the stages' ridges counts. The hidden reading that takes longer
    than the ridge is added to a0 too. On equal stages that is less than the time of one tile. On an A100 all reading
    takes less than that, so the ridge is 0. The embedding is a lookup and costs nothing.

    Args:
        layers: layers [first, end) of each stage.
        weight_bytes: bytes of one weight in memory.
        compute_bytes: bytes of a number of the computation, such as a key or value; None for weight_bytes.
        speed: speed of every stage's device, or one speed per stage; with `sums` if there are several shards.
        mlp_matrices: 3 with a gate, 2 without.
        num_experts: experts per layer, each of intermediate_size.
        shards: T, the number of ranks that compute each stage together. Coefficients and page_bytes are those of one of
            these ranks.
    """
    speeds = [speed] * len(layers) if isinstance(speed, DeviceSpeed) else list(speed)
    assert len(speeds) == len(layers), f"{len(speeds)} speeds for {len(layers)} stages"
    assert shards == 1 or all(own.sums is not None for own in speeds), "the speed of sums is not known"
    assert len({own.tile for own in speeds}) == 1, "stages have one tile"
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    expert = mlp_matrices * hidden_size * intermediate_size
    read_bytes = (attention + num_experts * expert) / shards * weight_bytes
    token_flops = 2 * (attention + experts_per_token * expert) / shards
    compute_bytes = compute_bytes or weight_bytes
    kv_bytes = 2 * (num_kv_heads // shards) * head_dim * compute_bytes
    size = 2 if compute_bytes <= 2 else 4
    tile = speeds[0].tile
    tiles_read = min(
        int(own.hidden_share * read_bytes / own.bytes_per_s / (token_flops / own.flops[size] * tile)) for own in speeds
    )

    def stage_cost(first: int, end: int, own: DeviceSpeed) -> StageCost:
        token_s, count = token_flops / own.flops[size], end - first
        sums_s = 2 * own.sums.fixed_s(shards) if own.sums is not None else 0.0
        sums_token_s = 2 * own.sums.byte_s(shards) * hidden_size * compute_bytes if own.sums is not None else 0.0
        return StageCost(
            (first, end),
            a0=count * (read_bytes / own.bytes_per_s - tiles_read * token_s * tile + own.layer_s + sums_s),
            a1=count * (token_s + sums_token_s) * tile,
            a2=count * 4 * num_heads / shards * head_dim / (own.attention_share * own.flops[size]),
            a3=count * kv_bytes / own.bytes_per_s,
            a4=0.0,
            page_bytes=count * kv_bytes * page_size,
        )

    stages = [stage_cost(first, end, own) for (first, end), own in zip(layers, speeds, strict=True)]
    head_weights = hidden_size * vocab_size
    head_read_s = head_weights * weight_bytes / speeds[-1].bytes_per_s
    head_s = 2 * head_weights / speeds[-1].flops[size]
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head_read_s, head_s=head_s)
    return CostModel(tile, tuple(stages), ridge=tiles_read * tile)
