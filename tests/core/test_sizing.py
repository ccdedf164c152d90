from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.cost import CostModel, Load, StageCost
from sarathi_pp.core.sizing import inflight, recut, saturation, stage_seconds, typical_load, whole_tiles
from tests.core.test_profile import PROFILE


def one_stage(tile: int, a0: float, a1: float) -> CostModel:
    return CostModel(tile, (StageCost((0, 4), a0, a1, a2=1e-6, a3=0.0, a4=0.0),))


def test_saturated_is_within_a_tenth_of_the_best_and_the_smallest_such() -> None:
    """n / (a0 + a1 n) is at 90 % of its value at 2048 where n = 0.9 * 2048 a0 / (a0 + 0.1 * 2048 a1)."""
    a0, a1 = 30e-3, 1e-3
    found = saturation(one_stage(1, a0, a1))
    best = 2048 / (a0 + 2048 * a1)
    assert found / (a0 + found * a1) >= 0.9 * best > (found - 1) / (a0 + (found - 1) * a1)


@pytest.mark.parametrize("tile", [64, 128, 100])
def test_saturation_is_whole_tiles(tile: int) -> None:
    assert saturation(one_stage(tile, 30e-3, tile * 1e-3)) % tile == 0
    assert saturation(one_stage(tile, 0.0, 1e-3)) == tile  # nothing is gained by more than one


def test_the_slowest_stage_decides_where_throughput_saturates() -> None:
    slow = StageCost((4, 8), 90e-3, 3e-3, 0.0, 0.0, 0.0)
    assert saturation(CostModel(1, (*one_stage(1, 0.0, 1e-3).stages, slow))) == saturation(one_stage(1, 90e-3, 3e-3))


@pytest.mark.parametrize(
    ("tile", "tokens", "tiles"),
    [(128, 300.0, (256, 384)), (128, 256.0, (256, 256)), (128, 5.0, (128, 128)), (1, 7.5, (7, 8))],
)
def test_whole_tiles_around_a_number(tile: int, tokens: float, tiles: tuple[int, int]) -> None:
    assert whole_tiles(one_stage(tile, 0.0, 1.0), tokens) == tiles


@pytest.mark.parametrize(("jitter_cv", "more"), [(0.0, 0), (0.03, 0), (0.031, 1)])
def test_jitter_asks_for_one_microbatch_more(jitter_cv: float, more: int) -> None:
    assert inflight(replace(PROFILE, jitter_cv=jitter_cv), "sarathi", 4) == 4 + more
    assert inflight(replace(PROFILE, jitter_cv=jitter_cv), "balanced", 4) == 5  # which uses it where it serves
    assert inflight(replace(PROFILE, jitter_cv=jitter_cv), "balanced", 1) == 1
    assert inflight(replace(PROFILE, jitter_cv=jitter_cv), "sarathi", 2) == 2  # a third cohort of decodes costs more


def test_the_typical_microbatch_has_ten_prompt_tokens_a_decode() -> None:
    load = typical_load(220)
    assert (load.prefill_tokens, load.decodes, load.num_tokens) == (200, 20, 220)


# Layers alike: 1 ms, 10 us a token; the embedding another 2 ms and 1 us a token, the head 5 ms and 0.3 ms a row.
ALIKE = CostModel(
    1,
    (
        StageCost((0, 4), 4e-3 + 2e-3, 4e-5 + 1e-6, 4e-8, 4e-7, 4e-5),
        StageCost((4, 8), 4e-3, 4e-5, 4e-8, 4e-7, 4e-5),
        StageCost((8, 12), 4e-3 + 5e-3, 4e-5, 4e-8, 4e-7, 4e-5, head_s=3e-4),
    ),
)
LOAD = Load(100, 50_000.0, 10, 5000)
LAYER_S = 1e-3 + 110 * 1e-5 + 50_000 * 1e-8 + 5000 * 1e-7 + 10 * 1e-5
EMBED_S = 2e-3 + 110e-6
HEAD_S = 5e-3 + 10 * 3e-4


@given(first=st.integers(0, 11), size=st.integers(1, 12))
def test_a_stage_is_its_layers_and_what_stands_at_the_ends(first: int, size: int) -> None:
    end = min(12, first + size)
    expected = LAYER_S * (end - first) + EMBED_S * (first == 0) + HEAD_S * (end == 12)
    assert stage_seconds(ALIKE, LOAD)(first, end) == pytest.approx(expected)


@given(cuts=st.sets(st.integers(1, 11), max_size=5))
def test_another_cut_costs_what_its_stages_take(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), 12]
    layers = list(zip(bounds, bounds[1:], strict=False))
    cut, seconds = recut(ALIKE, layers), stage_seconds(ALIKE, LOAD)
    assert [stage.layers for stage in cut.stages] == layers
    for index, (first, end) in enumerate(layers):
        assert cut.seconds(index, LOAD) == pytest.approx(seconds(first, end))
    assert [stage.head_s for stage in cut.stages] == [0.0] * (len(layers) - 1) + [3e-4]


def test_of_two_stages_the_first_tells_what_layers_take() -> None:
    """The embedding cannot be told from layers there, and counts as part of them."""
    two = CostModel(1, (ALIKE.stages[1], replace(ALIKE.stages[2])))
    two = CostModel(1, (replace(two.stages[0], layers=(0, 4)), replace(two.stages[1], layers=(4, 8))))
    assert stage_seconds(two, LOAD)(0, 2) == pytest.approx(2 * LAYER_S)
    assert stage_seconds(two, LOAD)(6, 8) == pytest.approx(2 * LAYER_S + HEAD_S)


def test_a_single_stage_has_only_its_sampled_rows_apart() -> None:
    one = CostModel(1, (replace(ALIKE.stages[2], layers=(0, 4)),))
    seconds = stage_seconds(one, LOAD)
    assert seconds(2, 4) - seconds(0, 2) == pytest.approx(10 * 3e-4)
    assert seconds(0, 4) == pytest.approx(one.seconds(0, LOAD))


def test_a_last_stage_that_is_faster_has_no_negative_head() -> None:
    fast = CostModel(1, (ALIKE.stages[0], ALIKE.stages[1], replace(ALIKE.stages[2], a0=1e-3)))
    assert stage_seconds(fast, Load(10, 0.0, 0, 0))(11, 12) == pytest.approx(1e-3 / 4 + 10 * 1e-5)
