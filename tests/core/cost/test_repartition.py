from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.cost.model import CostModel, LayerCost, Load, StageCost
from sarathi_pp.core.cost.repartition import repartition, stage_seconds
from sarathi_pp.core.partition import partition_by_time
from tests.core.cost.test_cost import COST, loads

# Equal layers: 1 ms, and 10 us per token. The embedding takes another 2 ms and 1 us per token, the head 5 ms and 0.3 ms
# per row.
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
    assert stage_seconds(ALIKE, LOAD, 4)(1, first, end) == pytest.approx(expected)
    # If stages keep their time per layer, the excess of the first one counts as its machine's.
    expected = LAYER_S * (end - first) + HEAD_S * (end == 12)
    assert stage_seconds(ALIKE, LOAD, 3)(1, first, end) == pytest.approx(expected)
    expected += EMBED_S / 4 * (end - first)
    assert stage_seconds(ALIKE, LOAD, 3)(0, first, end) == pytest.approx(expected)


@given(cuts=st.sets(st.integers(1, 11), max_size=5))
def test_another_cut_costs_what_its_stages_take(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), 12]
    layers = list(zip(bounds, bounds[1:], strict=False))
    cut, seconds = repartition(ALIKE, layers), stage_seconds(ALIKE, LOAD, len(layers))
    assert [stage.layers for stage in cut.stages] == layers
    for index, (first, end) in enumerate(layers):
        assert cut.seconds(index, LOAD) == pytest.approx(seconds(index, first, end))
    assert [stage.head_s for stage in cut.stages] == [0.0] * (len(layers) - 1) + [3e-4]


def test_of_two_stages_the_first_tells_what_layers_take() -> None:
    """The embedding cannot be separated from layers there, and counts as part of them."""
    two = CostModel(1, (ALIKE.stages[1], replace(ALIKE.stages[2])))
    two = CostModel(1, (replace(two.stages[0], layers=(0, 4)), replace(two.stages[1], layers=(4, 8))))
    seconds = stage_seconds(two, LOAD, 2)
    assert seconds(0, 0, 2) == pytest.approx(2 * LAYER_S)
    assert seconds(1, 6, 8) == pytest.approx(2 * LAYER_S + HEAD_S)


def test_a_single_stage_has_only_its_sampled_rows_apart() -> None:
    one = CostModel(1, (replace(ALIKE.stages[2], layers=(0, 4)),))
    seconds = stage_seconds(one, LOAD, 2)
    assert seconds(1, 2, 4) - seconds(0, 0, 2) == pytest.approx(10 * 3e-4)
    assert stage_seconds(one, LOAD, 1)(0, 0, 4) == pytest.approx(one.seconds(0, LOAD))


def test_a_last_stage_that_is_faster_has_no_negative_head() -> None:
    fast = CostModel(1, (ALIKE.stages[0], ALIKE.stages[1], replace(ALIKE.stages[2], a0=1e-3)))
    assert stage_seconds(fast, Load(10, 0.0, 0, 0), 3)(2, 11, 12) == pytest.approx(1e-3 / 4 + 10 * 1e-5)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_each_machine_is_as_slow_a_layer_whichever_layers_it_gets(slow: int) -> None:
    """There is no embedding, and the time of layers and head is known.

    One of three machines takes twice as long for both.
    """
    speeds = [2.0 if stage == slow else 1.0 for stage in range(3)]

    def true_stage(stage: int, layers: int) -> StageCost:
        span, head_s, head_rows_s = (4 * stage, 4 * stage + layers), 5e-3 * (stage == 2), 3e-4 * (stage == 2)
        costs = (layers * 1e-3 + head_s, layers * 1e-5, layers * 1e-8, layers * 1e-7, layers * 1e-5)
        return StageCost(span, *costs, head_s=head_rows_s).scaled(speeds[stage])

    measured = CostModel(1, tuple(true_stage(stage, 4) for stage in range(3)))
    layers = [(0, 5), (5, 7), (7, 12)]
    found, seconds = repartition(measured, layers), stage_seconds(measured, LOAD, 3)
    truth = CostModel(1, tuple(true_stage(stage, end - first) for stage, (first, end) in enumerate(layers)))
    for stage, span in enumerate(layers):
        assert found.seconds(stage, LOAD) == pytest.approx(seconds(stage, *span))
        assert seconds(stage, *span) == pytest.approx(truth.seconds(stage, LOAD))


@pytest.mark.parametrize("tokens_s", [(1e-9, 0.0), (0.0, 1e-9), (1e-9, 1e-7), (0.0, 0.0)])
def test_a_time_a_token_that_is_next_to_nothing_tells_no_speed(tokens_s: tuple[float, float]) -> None:
    """The excess of the last of two stages is the head's, whatever the sign of the noise."""
    fixed_s = (6e-3, 10e-3)
    spans, costs = ((0, 8), (8, 16)), zip(fixed_s, tokens_s, strict=True)
    cost = CostModel(
        1, tuple(StageCost(span, a0, a1, 0.0, 0.0, 0.0) for span, (a0, a1) in zip(spans, costs, strict=True))
    )
    seconds = stage_seconds(cost, Load(0, 0.0, 1, 0), 2)
    assert seconds(1, 12, 16) == pytest.approx(4e-3 + 3e-3, rel=1e-4)


def test_a_slow_machine_in_the_middle_gives_layers_away() -> None:
    """The middle one of three stages takes twice as long, and gives half of its layers away."""
    slow = CostModel(1, (ALIKE.stages[0], ALIKE.stages[1].scaled(2.0), ALIKE.stages[2]))
    layers = [(0, 5), (5, 7), (7, 12)]
    found, seconds = repartition(slow, layers), stage_seconds(slow, LOAD, 3)
    assert [found.seconds(1, LOAD), seconds(1, 5, 7)] == pytest.approx([2 * 2 * LAYER_S] * 2)
    # The excess of embedding and head over an inner stage's rate is less than it was: the inner stage is a slow one.
    assert found.stages[0].a2 == pytest.approx(5e-8) and found.stages[2].a2 == pytest.approx(5e-8)
    cut = repartition(slow, [(0, 4), (4, 6), (6, 8), (8, 12)])
    slow_s = [cut.seconds(1, LOAD), cut.seconds(2, LOAD)]
    assert slow_s == pytest.approx([2 * 2 * LAYER_S] * 2), "there the layers are the slow ones"


@given(load=loads, cuts=st.sets(st.integers(1, 7), min_size=2, max_size=5), ridge=st.sampled_from([0, 300]))
def test_another_number_of_stages_costs_the_same_in_all(load: Load, cuts: set[int], ridge: int) -> None:
    bounds = [0, *sorted(cuts), 8]
    layers = list(zip(bounds, bounds[1:], strict=False))
    cost = replace(COST, ridge=ridge)
    found = repartition(cost, layers)
    assert [stage.layers for stage in found.stages] == layers
    models = (cost, found)
    seconds = stage_seconds(cost, load, len(layers))
    assert [seconds(stage, *span) for stage, span in enumerate(layers)] == pytest.approx(
        [found.seconds(stage, load) for stage in range(len(layers))]
    )
    before, after = (sum(model.seconds(stage, load) for stage in range(len(model.stages))) for model in models)
    assert after == pytest.approx(before)
    assert [stage.head_s for stage in found.stages] == [0.0] * len(cuts) + [1e-2]
    assert sum(stage.page_bytes for stage in found.stages) == 800


@pytest.mark.parametrize("layers", [[(0, 8)], [(0, 3), (3, 8)], [(0, 1), (1, 2), (2, 8)]])
def test_a_layer_takes_its_share_of_its_stage(layers: list[tuple[int, int]]) -> None:
    found = repartition(COST, layers)
    assert sum(stage.a1 for stage in found.stages) == pytest.approx(5e-3)
    if layers[0] == (0, 1):
        assert found.stages[0].a1 == pytest.approx(2e-3 / 3)


def test_the_own_cut_is_the_model_itself() -> None:
    """The result is equal to the last bit: adding up separate parts would round."""
    assert repartition(COST, [(0, 3), (3, 8)]) is COST


# Two layers with a state, then one of attention, and so on. A layer of attention takes 3 ms, and has all the attention.
STATE = LayerCost("linear", 1e-3, 1e-5, 0.0, 0.0, 2e-4, 0)
ATTENTION = LayerCost("attention", 3e-3, 4e-5, 6e-8, 5e-7, 0.0, 64)
HYBRID = (STATE, STATE, ATTENTION) * 4


def true_stage(first: int, end: int, speed: float = 1.0, head_s: float = 0.0) -> StageCost:
    """Return the cost of layers of HYBRID on a machine that takes `speed` times as long."""
    layers = HYBRID[first:end]
    a0, a1, a2, a3, a4 = (speed * sum(getattr(one, name) for one in layers) for name in ("a0", "a1", "a2", "a3", "a4"))
    return StageCost((first, end), a0 + head_s, a1, a2, a3, a4, page_bytes=sum(one.page_bytes for one in layers))


def measured_hybrid(bounds: list[int]) -> CostModel:
    """Return the model as it was measured with these stages, whose layers are twice as slow as estimated."""
    stages = [true_stage(first, end, 2.0, 5e-3 * (end == 12)) for first, end in pairwise(bounds)]
    return CostModel(1, tuple(stages), layer_costs=HYBRID)


@pytest.mark.parametrize("before", [[0, 4, 8, 12], [0, 3, 9, 12], [0, 6, 12]])
@pytest.mark.parametrize("after", [[0, 1, 2, 12], [0, 2, 8, 12], [0, 5, 12], [0, 2, 3, 6, 12]])
def test_unequal_layers_divide_the_time_of_their_stage(before: list[int], after: list[int]) -> None:
    layers = list(pairwise(after))
    found, direct = repartition(measured_hybrid(before), layers), measured_hybrid(after)
    seconds = stage_seconds(measured_hybrid(before), LOAD, len(layers))
    for stage, span in enumerate(layers):
        assert found.seconds(stage, LOAD) == pytest.approx(direct.seconds(stage, LOAD))
        assert seconds(stage, *span) == pytest.approx(direct.seconds(stage, LOAD))
        assert found.stages[stage].page_bytes == direct.stages[stage].page_bytes


def test_a_stage_that_had_no_attention_gets_its_time_from_the_others() -> None:
    measured = measured_hybrid([0, 2, 7, 12])
    assert measured.stages[0].a2 == 0
    assert repartition(measured, [(0, 3), (3, 7), (7, 12)]).stages[0].a2 == pytest.approx(2 * ATTENTION.a2)


def test_the_split_of_unequal_layers_has_equal_times() -> None:
    """Six layers with a state, then three of attention, which take three times as long."""
    costs = (STATE,) * 6 + (replace(STATE, a0=3e-3, a1=3e-5, a4=6e-4),) * 3
    cost = CostModel(1, (StageCost((0, 9), 15e-3, 15e-5, 0.0, 0.0, 3e-3),), layer_costs=costs)
    assert partition_by_time(9, 3, stage_seconds(cost, LOAD, 3)) == ((0, 5), (5, 7), (7, 9))
    alike = replace(cost, layer_costs=())
    assert partition_by_time(9, 3, stage_seconds(alike, LOAD, 3)) == ((0, 3), (3, 6), (6, 9))
