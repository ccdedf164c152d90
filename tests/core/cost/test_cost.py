from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.plan import MicroBatch
from tests.thinning import examples

COST = CostModel(
    128,
    (
        StageCost((0, 3), 1e-3, 2e-3, 3e-7, 4e-6, 5e-4, page_bytes=300),
        StageCost((3, 8), 2e-3, 3e-3, 4e-7, 5e-6, 6e-4, head_s=1e-2, page_bytes=500),
    ),
)

loads = st.builds(Load, st.integers(0, 5000), st.floats(0, 1e8), st.integers(0, 500), st.integers(0, 10**7))
coefficients = st.floats(0, 1)
stages = st.builds(StageCost, st.just((0, 1)), *[coefficients] * 5, head_s=coefficients)


def test_the_formula_term_by_term() -> None:
    load = Load.of(MicroBatch.parse("m0[s0:256+130 s1:0+20 | d s2:99 s3:199]"))
    assert (load.prefill_tokens, load.decodes, load.decode_context) == (150, 2, 300)
    assert load.prefill_attention == 130 * 256 + 130**2 / 2 + 20**2 / 2
    terms = COST.terms(1, load)
    assert terms.fixed == 2e-3
    assert terms.prefill == pytest.approx(2 * 3e-3 + 4e-7 * load.prefill_attention)  # 152 tokens are two tiles of 128
    assert terms.context == pytest.approx(5e-6 * 300)
    assert terms.decode == pytest.approx(2 * (6e-4 + 1e-2))
    assert COST.seconds(1, load) == pytest.approx(terms.fixed + terms.prefill + terms.context + terms.decode)


@settings(max_examples=examples(200))
@given(stage=stages, tile=st.integers(1, 512), load=loads)
def test_the_terms_add_up_to_the_time(stage: StageCost, tile: int, load: Load) -> None:
    model = CostModel(tile, (stage,))
    assert model.terms(0, load).total == pytest.approx(model.seconds(0, load), rel=1e-9)


@settings(max_examples=examples(200))
@given(tile=st.integers(1, 64), ridge=st.integers(0, 64), tokens=st.integers(1, 256))
def test_tiles_are_those_of_the_ridge_at_least(tile: int, ridge: int, tokens: int) -> None:
    model = CostModel(tile, (), ridge)
    assert model.tiles(tokens) == max(model.tiles(ridge), CostModel(tile, ()).tiles(tokens))


@settings(max_examples=examples(200))
@given(stage=stages, ridge=st.integers(1, 64), load=loads)
def test_fewer_tokens_than_the_ridge_take_as_long_as_that_many(stage: StageCost, ridge: int, load: Load) -> None:
    with_it, without = CostModel(1, (stage,), ridge), CostModel(1, (stage,))
    missing = max(0, ridge - load.num_tokens)
    assert with_it.seconds(0, load) == pytest.approx(without.seconds(0, load) + stage.a1 * missing, rel=1e-9)
    assert with_it.terms(0, load).total == pytest.approx(with_it.seconds(0, load), rel=1e-9)


@given(stage=stages, tile=st.integers(1, 512), load=loads, factor=st.floats(0.1, 10))
def test_a_scaled_stage_takes_that_many_times_as_long(stage: StageCost, tile: int, load: Load, factor: float) -> None:
    model, scaled = CostModel(tile, (stage,)), CostModel(tile, (stage.scaled(factor),))
    assert scaled.seconds(0, load) == pytest.approx(factor * model.seconds(0, load), rel=1e-9)
    assert (scaled.stages[0].layers, scaled.stages[0].page_bytes) == (stage.layers, stage.page_bytes)


@pytest.mark.parametrize(("tokens", "tiles"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_tokens_move_in_whole_tiles(tokens: int, tiles: int) -> None:
    assert COST.terms(0, Load(tokens, 0.0, 0, 0)).prefill == pytest.approx(tiles * 2e-3)
