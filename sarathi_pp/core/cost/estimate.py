"""A cost model from a model's shape and a device's speed, for use before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost.model import CostModel, LayerCost, StageCost
from sarathi_pp.layer_shape import LayerShape


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


# FLOP per number of a recurrent state and token: read with the key, updated with the value, and read with the query.
_STATE_FLOP = 6
# Bytes per number of a recurrent state that a decode moves: it reads and writes float32.
_STATE_BYTES = 8


def estimate_cost(
    layers: Sequence[tuple[int, int]],
    *,
    shapes: Sequence[LayerShape],
    hidden_size: int,
    vocab_size: int,
    weight_bytes: float,
    compute_bytes: int | None = None,
    kv_bytes: int | None = None,
    kv_traffic: int | None = None,
    speed: DeviceSpeed | Sequence[DeviceSpeed],
    page_size: int = 16,
    shards: int = 1,
) -> CostModel:
    """Return a cost model from a model's shape. It shows which option is faster; its times may be wrong by a factor.

    A stage's coefficients are sums over its layers. Those of one layer (`LayerShape`) are:

        a0   launches, and reading that is not hidden    layer_s + (1 - hidden) * weights * bytes / bandwidth
        a1   a tile of tokens, 2 FLOP per weight, and    tile * (2 * token_weights / flops
             6 per number of a recurrent state                   + 6 * state_values / (flops * share))
        ridge   every weight is read once; the hidden    hidden * (weights * bytes / bandwidth) / (time of a token)
                part takes as long as this many tokens
        a2   2 FLOP per channel, query and key           2 * score_channels / (flops * share)
        a3   keys and values are read, and those of      the larger of token_values * traffic / bandwidth
             latents (MLA) multiplied meanwhile          and 2 * decode_channels / flops
        a4   the state is read and written in float32    8 * state_values / bandwidth
        LM head   its weights are read with a0 of the last stage, and a row costs 2 * h * vocabulary / flops. The two
                  times are added up: with few rows, reading does not overlap with computing.

    Each shard has a T-th of weights, heads and states, and all of the LM head. It stores a T-th of the keys, but at
    least one KV head, and latents in full. With several shards, every layer adds up hidden states over them twice,
    after attention and after the MLP. The fixed time of these sums is in a0, and the time of their bytes is in a1.

    The ridge is in whole tiles, and the smallest of the stages' ridges counts. The hidden reading that takes longer
    than the ridge is added to a0 too. On equal stages that is less than the time of one tile. If layers differ, it may
    be much more on the other stages, and they are then estimated too slow for microbatches above the ridge. For a dense
    model on an A100, all reading takes less than one tile, so the ridge is 0. The embedding is a lookup and costs
    nothing.

    Args:
        layers: layers [first, end) of each stage.
        shapes: the shape of each layer of the model.
        weight_bytes: bytes that are read or written for one weight of a layer. Those of the LM head are at most
            compute_bytes.
        compute_bytes: bytes of a number of the computation; None for weight_bytes.
        kv_bytes: bytes of a number of a key or value in the KV cache; None for compute_bytes.
        kv_traffic: bytes that attention reads or writes for such a number; None for kv_bytes.
        speed: speed of every stage's device, or one speed per stage; with `sums` if there are several shards.
        shards: T, the number of ranks that compute each stage together. Coefficients and page_bytes are those of one of
            these ranks.
    """
    speeds = [speed] * len(layers) if isinstance(speed, DeviceSpeed) else list(speed)
    assert len(speeds) == len(layers), f"{len(speeds)} speeds for {len(layers)} stages"
    assert shards == 1 or all(own.sums is not None for own in speeds), "the speed of sums is not known"
    assert len({own.tile for own in speeds}) == 1, "stages have one tile"
    compute_bytes = compute_bytes or int(weight_bytes)
    stored_bytes = kv_bytes or compute_bytes
    kv_traffic = kv_traffic or stored_bytes
    size = 2 if compute_bytes <= 2 else 4
    sum_bytes = hidden_size * compute_bytes

    def estimate_stages(spans: Sequence[tuple[int, int]], devices: Sequence[DeviceSpeed]) -> CostModel:
        means = [
            _MeanLayer.of(shapes[first:end], shards, weight_bytes, stored_bytes, kv_traffic) for first, end in spans
        ]
        pairs = list(zip(means, devices, strict=True))
        tiles_read = min(mean.tiles_read(own, size) for mean, own in pairs)
        stages = [
            mean.stage_cost(span, own, size, tiles_read, _sums_s(own, sum_bytes, shards), page_size)
            for span, (mean, own) in zip(spans, pairs, strict=True)
        ]
        return CostModel(devices[0].tile, tuple(stages), ridge=tiles_read * devices[0].tile)

    model = estimate_stages(layers, speeds)
    head_weights, last = hidden_size * vocab_size, model.stages[-1]
    head_read_s = head_weights * min(weight_bytes, compute_bytes) / speeds[-1].bytes_per_s
    head_s = 2 * head_weights / speeds[-1].flops[size]
    stages = (*model.stages[:-1], replace(last, a0=last.a0 + head_read_s, head_s=head_s))
    layer_costs: tuple[LayerCost, ...] = ()
    if len(set(shapes)) > 1 or any(shape.keeps_state for shape in shapes):
        each = estimate_stages([(index, index + 1) for index in range(len(shapes))], [speeds[0]] * len(shapes)).stages
        layer_costs = tuple(LayerCost.of(shape.kind, stage) for shape, stage in zip(shapes, each, strict=True))
    return replace(model, stages=stages, layer_costs=layer_costs)


def _sums_s(own: DeviceSpeed, sum_bytes: int, shards: int) -> tuple[float, float]:
    """Return the seconds of a layer's sums over its shards: those of a microbatch, and those of each token.

    Args:
        sum_bytes: bytes of a token's hidden state.
    """
    return (
        (2 * own.sums.fixed_s(shards), 2 * own.sums.byte_s(shards) * sum_bytes) if own.sums is not None else (0.0, 0.0)
    )


@dataclass(frozen=True, slots=True)
class _MeanLayer:
    """The mean work of a stage's layers on one shard.

    Attributes:
        count: number of layers.
        kv_bytes: bytes of keys and values per token, all layers together.
        kv_traffic: bytes that attention reads or writes for them.
    """

    count: int
    read_bytes: float
    token_flop: float
    score_flop: float
    decode_flop: float
    state_values: float
    kv_bytes: int
    kv_traffic: int

    @classmethod
    def of(
        cls, shapes: Sequence[LayerShape], shards: int, weight_bytes: float, stored_bytes: int, kv_traffic: int
    ) -> _MeanLayer:
        count, kv_values = len(shapes), sum(shape.shard_values(shards) for shape in shapes)
        return cls(
            count,
            sum(shape.weights for shape in shapes) / count / shards * weight_bytes,
            2 * (sum(shape.token_weights for shape in shapes) / count) / shards,
            2 * (sum(shape.score_channels for shape in shapes) / count) / shards,
            2 * (sum(shape.decode_channels for shape in shapes) / count) / shards,
            sum(shape.state_values for shape in shapes) / count / shards,
            kv_values * stored_bytes,
            kv_values * kv_traffic,
        )

    def tiles_read(self, own: DeviceSpeed, size: int) -> int:
        """Return the tiles of tokens that take as long as the hidden part of reading the weights."""
        return int(own.hidden_share * self.read_bytes / own.bytes_per_s / (self._token_s(own, size) * own.tile))

    def stage_cost(
        self,
        span: tuple[int, int],
        own: DeviceSpeed,
        size: int,
        tiles_read: int,
        sums_s: tuple[float, float],
        page_size: int,
    ) -> StageCost:
        """Return the coefficients of the stage, without the LM head.

        Args:
            size: bytes of a number of the computation, 2 or 4.
            tiles_read: the ridge, in tiles.
            sums_s: see `_sums_s`.
        """
        count, token_s, flops = self.count, self._token_s(own, size), own.flops[size]
        read_s = self.read_bytes / own.bytes_per_s
        return StageCost(
            span,
            a0=count * (read_s - tiles_read * token_s * own.tile + own.layer_s + sums_s[0]),
            a1=count * (token_s + sums_s[1]) * own.tile,
            a2=count * self.score_flop / (own.attention_share * flops),
            a3=max(self.kv_traffic / own.bytes_per_s, count * self.decode_flop / flops),
            a4=count * _STATE_BYTES * self.state_values / own.bytes_per_s,
            page_bytes=self.kv_bytes * page_size,
        )

    def _token_s(self, own: DeviceSpeed, size: int) -> float:
        return (self.token_flop + _STATE_FLOP * self.state_values / own.attention_share) / own.flops[size]
