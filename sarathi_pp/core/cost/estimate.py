"""A cost model from a model's shape and what a device sustains, for when nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost.model import CostModel, StageCost


@dataclass(frozen=True, slots=True)
class SumSpeed:
    """What adding up a tensor over the T shards of a stage takes: a base, and hops, each with a part of the tensor.

        ring      2 (T-1) hops of a T-th of it
        gathers   T-1 hops of all of it, added up by each shard

    hop_s: of each hop, whatever its size. bytes_per_s: one way between two shards, adding included.
    """

    base_s: float
    hop_s: float
    bytes_per_s: float
    gathers: bool = False

    def fixed_s(self, shards: int) -> float:
        """Of a sum, whatever its size."""
        return self.base_s + self._hops(shards) * self.hop_s if shards > 1 else 0.0

    def byte_s(self, shards: int) -> float:
        """Of each byte of the tensor."""
        part = 1 if self.gathers else 1 / shards
        return self._hops(shards) * part / self.bytes_per_s

    def _hops(self, shards: int) -> int:
        return shards - 1 if self.gathers else 2 * (shards - 1)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one stage's device sustains. flops: of linear layers, by bytes a weight; attention gets a share of it.

    tile: tokens that linear layers take at once. layer_s: of launching a layer's operations, whatever they compute.
    hidden_share: of what reading weights takes, so much goes on while they are multiplied. sums: over the devices that
    hold a stage together; None where each has one alone.
    """

    flops: Mapping[int, float]
    bytes_per_s: float
    tile: int
    layer_s: float
    attention_share: float = 0.25
    hidden_share: float = 1.0
    sums: SumSpeed | None = None


# cpu: one AVX512-BF16 core of a shared server, as measured on the model of examples/benchmarks/measure_300m.py, of
# which 0.8 of the reading was hidden (on a Zen 5; of the 254M model half was). cuda: an
# A100-80GB at 60 % of its 312 TFLOP/s (19.5 in float32) and 80 % of its 2.04 TB/s, layers launched one operation at a
# time.
# Sums on cpu: as wire/shard_group.py makes them, measured with gloo over loopback on two cores that others used too,
# the fastest tenth of 60 (2 shards: 0.38 ms, and 1.3 ns a byte; 3 shards: 0.7 to 1.1 ms, and 3.7 ns). On cuda: NCCL's
# own model of a ring over NVLink (src/graph/tuning.cc of 2.8: 3.6 us and 0.47 us a hop in its low-latency protocol, 235
# GB/s at the most on an A100); nothing that was measured here.
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
    speed: DeviceSpeed,
    mlp_matrices: int = 3,
    num_experts: int = 1,
    experts_per_token: int = 1,
    page_size: int = 16,
    shards: int = 1,
) -> CostModel:
    """A cost model from a model's shape, for when nothing was measured: right in kind, off by a factor in size.

    layers: [first, end) of each stage. weight_bytes: of one weight, and of one key or value.
    mlp_matrices: 3 with a gate, 2 without. experts: of intermediate_size each. shards: T ranks that hold each stage
    together, whose `speed` knows of sums; coefficients and page_bytes are then of each of them.

        weights of a layer   w = h*(heads + 2*kv_heads)*d + heads*d*h + experts * mlp_matrices*h*i
        a0   launching, and reading that shows       layers * (layer_s + (1 - hidden) * w * bytes / bandwidth)
        a1   a tile of tokens, 2 FLOP a weight       layers * 2 * w_active * tile / flops
        ridge   every weight is read once, of which  hidden * (w * bytes / bandwidth) / (2 * w_active / flops)
                the rest takes as long as so many tokens
        a2   4 FLOP a channel, query and key         layers * 4 * heads*d / (flops * share)
        a3   a key and a value are read              layers * 2 * kv_heads*d * bytes / bandwidth
        head: its weights are read with a0 of the last stage, and a row costs 2 * h * vocabulary / flops: added up,
              since its rows are few

    Shards have a T-th of weights, heads and keys each, and all of the head. Two sums of hidden states a layer, behind
    attention and behind the MLP, come on top: what each takes whatever its size with a0, its bytes with a1.

    The ridge is in whole tiles, and what reading takes beyond it is added to a0 too: at worst the time of one tile,
    which on an A100 is all of it. The embedding is a lookup and costs nothing.
    """
    assert shards == 1 or speed.sums is not None, "what a sum takes is not known"
    flops = speed.flops[2 if weight_bytes <= 2 else 4]
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    expert = mlp_matrices * hidden_size * intermediate_size
    read_s = (attention + num_experts * expert) / shards * weight_bytes / speed.bytes_per_s
    token_s = 2 * (attention + experts_per_token * expert) / shards / flops
    kv_bytes = 2 * (num_kv_heads // shards) * head_dim * weight_bytes
    sums_s = sums_token_s = 0.0
    if speed.sums is not None:
        sums_s = 2 * speed.sums.fixed_s(shards)
        sums_token_s = 2 * speed.sums.byte_s(shards) * hidden_size * weight_bytes
    tiles_read = int(speed.hidden_share * read_s / (token_s * speed.tile))
    fixed_s = read_s - tiles_read * token_s * speed.tile + speed.layer_s + sums_s
    stages = [
        StageCost(
            (first, end),
            a0=(end - first) * fixed_s,
            a1=(end - first) * (token_s + sums_token_s) * speed.tile,
            a2=(end - first) * 4 * num_heads / shards * head_dim / (speed.attention_share * flops),
            a3=(end - first) * kv_bytes / speed.bytes_per_s,
            a4=0.0,
            page_bytes=(end - first) * kv_bytes * page_size,
        )
        for first, end in layers
    ]
    head_weights = hidden_size * vocab_size
    head_read_s = head_weights * weight_bytes / speed.bytes_per_s
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head_read_s, head_s=2 * head_weights / flops)
    return CostModel(speed.tile, tuple(stages), ridge=tiles_read * speed.tile)
