"""The analytic cost: plausible for every shape, and close to the measurements that exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sarathi_pp.core.cost.estimate import DEVICE_SPEEDS, SumSpeed, estimate_cost
from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.layer_shape import LayerShape

# The model of examples/benchmarks/measure_300m.py.
SIZES: dict[str, int] = {
    "hidden_size": 1024,
    "intermediate_size": 3712,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
}
LAYER = LayerShape.plain(**SIZES)
SHAPE: dict[str, Any] = {
    "shapes": [LAYER] * 16,
    "hidden_size": 1024,
    "vocab_size": 32000,
    "weight_bytes": 2,
    "speed": DEVICE_SPEEDS["cpu"],
}
HALVES = [(0, 8), (8, 16)]
WEIGHTS = 1024 * 64 * (16 + 8 + 8 + 16) + 3 * 1024 * 3712


def reading_s(model: CostModel, stage: int = 0) -> float:
    """Return the time of a microbatch so small that it waits only for the weights."""
    return model.seconds(stage, Load(1, 0.0, 0, 0))


def test_it_is_within_a_factor_of_two_of_what_a_profile_measured() -> None:
    """The profile is of two stages on two AVX512-BF16 cores; see the README."""
    model = estimate_cost(HALVES, **SHAPE)
    first, last = model.stages
    assert 1 / 2 < reading_s(model) / 20e-3 < 2
    assert 1 / 2 < first.a1 / 0.75e-3 < 2
    assert 1 / 2 < first.a2 / 5e-7 < 2
    assert 1 / 2 < first.a3 / 7e-7 < 2
    assert 1 / 2 < last.head_s / 2.6e-4 < 2


@pytest.mark.parametrize("device", sorted(DEVICE_SPEEDS))
def test_each_term_counts_its_flops_or_its_bytes(device: str) -> None:
    speed = DEVICE_SPEEDS[device]
    model = estimate_cost([(0, 3), (3, 4)], **SHAPE | {"speed": speed})
    first, last = model.stages
    read_s, tile_s = 2 * WEIGHTS / speed.bytes_per_s, 2 * WEIGHTS * speed.tile / speed.flops[2]
    tiles = int(speed.hidden_share * read_s / tile_s)
    assert model.ridge == tiles * speed.tile
    assert first.a0 == pytest.approx(3 * (read_s - tiles * tile_s + speed.layer_s))
    assert first.a1 == pytest.approx(3 * tile_s)
    assert first.a2 == pytest.approx(3 * 4 * 16 * 64 * 4 / speed.flops[2])
    assert first.a3 == pytest.approx(3 * 2 * 8 * 64 * 2 / speed.bytes_per_s)
    assert first.page_bytes == 16 * 3 * 2 * 8 * 64 * 2
    assert last.a0 == pytest.approx(first.a0 / 3 + 2 * 1024 * 32000 / speed.bytes_per_s)
    assert (first.head_s, last.head_s) == (0.0, pytest.approx(2 * 1024 * 32000 / speed.flops[2]))
    assert model.tile == speed.tile


def test_experts_are_all_read_and_only_some_computed() -> None:
    dense = estimate_cost([(0, 1), (1, 2)], **SHAPE)
    experts = LayerShape.plain(**SIZES, num_experts=8, experts_per_token=1)
    sparse = estimate_cost([(0, 1), (1, 2)], **SHAPE | {"shapes": [experts] * 2})
    assert sparse.stages[0].a1 == dense.stages[0].a1
    assert reading_s(sparse) > 4 * reading_s(dense)


@pytest.mark.parametrize("device", sorted(DEVICE_SPEEDS))
def test_what_is_read_meanwhile_costs_nothing(device: str) -> None:
    """Reading during compute costs nothing, except the remainder of a tile and the share that shows."""
    speed = DEVICE_SPEEDS[device]
    model = estimate_cost([(0, 1), (1, 2)], **SHAPE | {"speed": speed})
    read_s, token_s = 2 * WEIGHTS / speed.bytes_per_s, 2 * WEIGHTS / speed.flops[2]
    hidden_s = speed.hidden_share * read_s
    for num_tokens in (1, max(model.ridge, speed.tile), 4096):
        tiled = -(-num_tokens // speed.tile) * speed.tile
        least = speed.layer_s + read_s - hidden_s + max(hidden_s, tiled * token_s)
        assert least - 1e-12 <= model.seconds(0, Load(num_tokens, 0.0, 0, 0)) <= least + speed.tile * token_s


def test_float32_reads_twice_the_bytes() -> None:
    half, full = (estimate_cost([(0, 1)], **SHAPE | {"weight_bytes": size}).stages[0] for size in (2, 4))
    assert full.a3 == pytest.approx(2 * half.a3) and full.page_bytes == 2 * half.page_bytes
    assert full.a1 > half.a1


def test_stages_add_up_whatever_the_cut() -> None:
    load = Load(300, 1e5, 20, 20_000)
    totals = [
        sum(model.seconds(stage, load) for stage in range(len(model.stages)))
        for model in (estimate_cost(cut, **SHAPE) for cut in ([(0, 16)], HALVES, [(0, 1), (1, 9), (9, 16)]))
    ]
    assert totals == pytest.approx([totals[0]] * 3)


@pytest.mark.parametrize("device", sorted(DEVICE_SPEEDS))
def test_shards_have_their_part_of_the_layers_and_two_sums_a_layer(device: str) -> None:
    speed = DEVICE_SPEEDS[device]
    assert speed.sums is not None
    cut: list[tuple[int, int]] = [(0, 3), (3, 4)]
    models = [estimate_cost(cut, **SHAPE | {"speed": speed}, shards=shards) for shards in (1, 4)]
    (whole, whole_last), (first, last) = (model.stages for model in models)
    sum_s, byte_s = speed.sums.fixed_s(4), speed.sums.byte_s(4)
    read_s, tile_s = WEIGHTS / 2 / speed.bytes_per_s, speed.tile * WEIGHTS / 2 / speed.flops[2]
    tiles = int(speed.hidden_share * read_s / tile_s)
    assert models[0].ridge == models[1].ridge == tiles * speed.tile
    assert first.a0 == pytest.approx(3 * (read_s - tiles * tile_s + speed.layer_s + 2 * sum_s))
    assert first.a1 == pytest.approx(3 * (tile_s + speed.tile * 2 * byte_s * 1024 * 2))
    assert (first.a2, first.a3) == pytest.approx((whole.a2 / 4, whole.a3 / 4))
    assert first.page_bytes * 4 == whole.page_bytes
    # The head is whole on every shard.
    assert last.head_s == whole_last.head_s
    assert last.a0 - first.a0 / 3 == pytest.approx(whole_last.a0 - whole.a0 / 3)


def test_a_sum_takes_its_hops_and_one_shard_makes_none() -> None:
    ring, gather = SumSpeed(5.0, 2.0, 100.0), SumSpeed(5.0, 2.0, 100.0, gathers=True)
    assert (ring.fixed_s(4), ring.byte_s(4)) == (5 + 6 * 2, pytest.approx(6 / 4 / 100))
    assert (gather.fixed_s(4), gather.byte_s(4)) == (5 + 3 * 2, pytest.approx(3 / 100))
    assert ring.byte_s(2) == gather.byte_s(2)  # in either layout each sends all of it once
    assert {(one.fixed_s(1), one.byte_s(1)) for one in (ring, gather)} == {(0.0, 0.0)}


def test_one_shard_needs_no_sums_and_two_do() -> None:
    alone = SHAPE | {"speed": replace(DEVICE_SPEEDS["cpu"], sums=None)}
    assert estimate_cost(HALVES, **alone) == estimate_cost(HALVES, **SHAPE)
    with pytest.raises(AssertionError, match="the speed of sums"):
        estimate_cost(HALVES, **alone, shards=2)


def test_shards_are_worth_it_where_there_is_much_to_read() -> None:
    """Half of 300M weights saves less than a sum over gloo takes. Half of 70B over NVLink saves more."""
    small = [reading_s(estimate_cost([(0, 16)], **SHAPE, shards=shards)) for shards in (1, 2)]
    assert small[1] > 0.5 * small[0]
    sizes = SIZES | {"hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64, "head_dim": 128}
    large = SHAPE | {"shapes": [LayerShape.plain(**sizes)] * 16, "hidden_size": 8192, "speed": DEVICE_SPEEDS["cuda"]}
    models = [estimate_cost([(0, 16)], **large, shards=shards) for shards in (1, 8)]
    whole, split = (model.stages[0] for model in models)
    assert reading_s(models[1]) < 0.3 * reading_s(models[0]) and split.a1 < 0.3 * whole.a1


@pytest.mark.parametrize("cut", [[(0, 8), (8, 16)], [(0, 5), (5, 11), (11, 16)]])
def test_another_cut_of_sharded_stages_is_what_the_estimate_makes_of_it(cut: list[tuple[int, int]]) -> None:
    """The head is separated from the layers by the time of a layer elsewhere, sums included."""
    three = estimate_cost([(0, 6), (6, 12), (12, 16)], **SHAPE, shards=2)
    again, direct = repartition(three, cut), estimate_cost(cut, **SHAPE, shards=2)
    for load in (Load(256, 3e4, 0, 0), Load(0, 0, 30, 20_000)):
        for stage in range(len(cut)):
            assert again.seconds(stage, load) == pytest.approx(direct.seconds(stage, load), rel=1e-6)


# A layer with a recurrent state, and one with a latent for all of its 64 heads and few other weights.
STATE = LayerShape("linear", 3_000_000, 3_000_000, state_values=64_000)
PRODUCTS = 64 * (2 * 128 + 32)
LATENT = LayerShape("latent attention", 4_000_000, 4_000_000, PRODUCTS, PRODUCTS, token_values=128 + 32)
MIXED = SHAPE | {"shapes": [STATE, STATE, LATENT, STATE], "weight_bytes": 2}


@pytest.mark.parametrize("device", sorted(DEVICE_SPEEDS))
def test_a_stage_of_unequal_layers_is_their_sum(device: str) -> None:
    speed = DEVICE_SPEEDS[device]
    model = estimate_cost([(0, 2), (2, 4)], **MIXED | {"speed": speed})
    first, last = model.stages
    state_s = (2 * 3e6 + 6 * 64_000 / speed.attention_share) / speed.flops[2]
    assert first.a1 == pytest.approx(2 * speed.tile * state_s)
    assert last.a1 == pytest.approx(speed.tile * (state_s + 2 * 4e6 / speed.flops[2]))
    assert (first.a2, first.a3, first.page_bytes) == (0, 0, 0)
    assert last.a2 == pytest.approx(2 * LATENT.score_channels / (speed.attention_share * speed.flops[2]))
    assert last.page_bytes == 16 * 160 * 2
    assert first.a4 == pytest.approx(2 * 8 * 64_000 / speed.bytes_per_s) == pytest.approx(2 * last.a4)


def test_decodes_wait_for_the_products_with_latents_if_these_take_longer_than_reading_them() -> None:
    speed = DEVICE_SPEEDS["cpu"]
    products_s, read_s = 2 * LATENT.score_channels / speed.flops[2], 160 * 2 / speed.bytes_per_s
    assert products_s > read_s
    assert estimate_cost([(0, 4)], **MIXED).stages[0].a3 == pytest.approx(products_s)
    fast = replace(speed, flops={2: 1e15})
    assert estimate_cost([(0, 4)], **MIXED | {"speed": fast}).stages[0].a3 == pytest.approx(read_s)


def test_the_smallest_ridge_of_unequal_stages_counts() -> None:
    experts = LayerShape.plain(**SIZES, num_experts=8, experts_per_token=1)
    equal, unequal = (
        estimate_cost(HALVES, **SHAPE | {"shapes": one}) for one in ([LAYER] * 16, [LAYER] * 8 + [experts] * 8)
    )
    assert unequal.ridge == equal.ridge
    assert estimate_cost(HALVES, **SHAPE | {"shapes": [experts] * 16}).ridge > 4 * equal.ridge


def test_every_shard_stores_all_of_a_latent_and_a_part_of_the_heads() -> None:
    whole, half = (estimate_cost([(0, 4)], **MIXED, shards=shards).stages[0] for shards in (1, 2))
    assert half.page_bytes == whole.page_bytes
    assert half.a4 == pytest.approx(whole.a4 / 2)
    few = SHAPE | {"shapes": [replace(LAYER, kv_heads=2)] * 16}
    parts = [estimate_cost([(0, 16)], **few, shards=shards).stages[0].page_bytes for shards in (1, 2, 8)]
    assert parts == [parts[0], parts[0] // 2, parts[0] // 2]


def test_layers_get_costs_of_their_own_only_if_they_differ() -> None:
    assert estimate_cost(HALVES, **SHAPE).layer_costs == ()
    costs = estimate_cost([(0, 4)], **MIXED).layer_costs
    assert [cost.kind for cost in costs] == ["linear", "linear", "latent attention", "linear"]
    assert [cost.a2 > 0 for cost in costs] == [False, False, True, False]
    assert costs[0] == costs[3] and costs[2].a1 > costs[0].a1


def test_equal_layers_have_costs_of_their_own_only_if_they_keep_states() -> None:
    """Otherwise nothing in a profile would say that sequences cannot share pages."""
    assert estimate_cost(HALVES, **SHAPE).layer_costs == ()
    state = replace(LAYER, kind="mamba", score_channels=0, token_values=0, state_values=1000)
    model = estimate_cost(HALVES, **SHAPE | {"shapes": [state] * 16})
    assert model.keeps_states and len(model.layer_costs) == 16 and len(set(model.layer_costs)) == 1
