"""A cost model from a model's shape and what a device sustains, for when nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost import CostModel, StageCost


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one stage's device sustains. flops: of linear layers, by bytes a weight; attention gets a share of it.

    tile: tokens that linear layers take at once. layer_s: of launching a layer's operations, whatever they compute.
    """

    flops: Mapping[int, float]
    bytes_per_s: float
    tile: int
    layer_s: float
    attention_share: float = 0.25


# cpu: one AVX512-BF16 core of a shared server, as measured on the model of examples/measure/measure_300m.py. cuda: an
# A100-80GB at 60 % of its 312 TFLOP/s (19.5 in float32) and 80 % of its 2.04 TB/s, layers launched one operation at a
# time.
DEVICE_SPEEDS: Mapping[str, DeviceSpeed] = {
    "cpu": DeviceSpeed({2: 3e11, 4: 1e11}, 1.5e10, 1, 2e-4),
    "cuda": DeviceSpeed({2: 1.9e14, 4: 1.2e13}, 1.6e12, 128, 2e-4),
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
) -> CostModel:
    """A cost model from a model's shape, for when nothing was measured: right in kind, off by a factor in size.

    layers: [first, end) of each stage. weight_bytes: of one weight, and of one key or value.
    mlp_matrices: 3 with a gate, 2 without. experts: of intermediate_size each.

        weights of a layer   w = h*(heads + 2*kv_heads)*d + heads*d*h + experts * mlp_matrices*h*i
        a0   every weight is read once               layers * (w * bytes / bandwidth + launching)
        a1   a tile of tokens, 2 FLOP a weight       layers * 2 * w_active * tile / flops
        a2   4 FLOP a channel, query and key         layers * 4 * heads*d / (flops * share)
        a3   a key and a value are read              layers * 2 * kv_heads*d * bytes / bandwidth
        head: its weights are read with a0 of the last stage, and a row costs 2 * h * vocabulary / flops

    Reading and computing are added up, where they overlap on a real device: at worst that is twice the time. The
    embedding is a lookup and costs nothing.
    """
    flops = speed.flops[2 if weight_bytes <= 2 else 4]
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    expert = mlp_matrices * hidden_size * intermediate_size
    read_s = (attention + num_experts * expert) * weight_bytes / speed.bytes_per_s
    token_s = 2 * (attention + experts_per_token * expert) / flops
    kv_bytes = 2 * num_kv_heads * head_dim * weight_bytes
    stages = [
        StageCost(
            (first, end),
            a0=(end - first) * (read_s + speed.layer_s),
            a1=(end - first) * token_s * speed.tile,
            a2=(end - first) * 4 * num_heads * head_dim / (speed.attention_share * flops),
            a3=(end - first) * kv_bytes / speed.bytes_per_s,
            a4=0.0,
            page_bytes=(end - first) * kv_bytes * page_size,
        )
        for first, end in layers
    ]
    head_weights = hidden_size * vocab_size
    head_read_s = head_weights * weight_bytes / speed.bytes_per_s
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head_read_s, head_s=2 * head_weights / flops)
    return CostModel(speed.tile, tuple(stages))
