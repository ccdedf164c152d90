from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.sizing import inflight, saturation, typical_load, whole_tiles
from sarathi_pp.core.policy import parse_policy
from tests.core.cost.test_profile import PROFILE


def one_stage(tile: int, a0: float, a1: float) -> CostModel:
    return CostModel(tile, (StageCost((0, 4), a0, a1, a2=1e-6, a3=0.0, a4=0.0),))


def test_saturated_is_within_a_tenth_of_the_best_and_the_smallest_such() -> None:
    """n / (a0 + a1 n) is at 90 % of its value at 2048 when n = 0.9 * 2048 a0 / (a0 + 0.1 * 2048 a1)."""
    a0, a1 = 30e-3, 1e-3
    found = saturation(one_stage(1, a0, a1))
    best = 2048 / (a0 + 2048 * a1)
    assert found / (a0 + found * a1) >= 0.9 * best > (found - 1) / (a0 + (found - 1) * a1)


@pytest.mark.parametrize("tile", [64, 128, 100])
def test_saturation_is_whole_tiles(tile: int) -> None:
    assert saturation(one_stage(tile, 30e-3, tile * 1e-3)) % tile == 0
    assert saturation(one_stage(tile, 0.0, 1e-3)) == tile  # more than one gains nothing


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
    profile = replace(PROFILE, jitter_cv=jitter_cv)
    sarathi, balanced = parse_policy("sarathi"), parse_policy("balanced")
    assert inflight(profile, sarathi, 4) == 4 + more
    assert inflight(profile, balanced, 4) == 5  # which uses it if it helps
    assert inflight(profile, balanced, 1) == 1
    assert inflight(profile, sarathi, 2) == 2  # a third cohort of decodes costs more


def test_the_typical_microbatch_has_ten_prompt_tokens_a_decode() -> None:
    load = typical_load(220)
    assert (load.prefill_tokens, load.decodes, load.num_tokens) == (200, 20, 220)
