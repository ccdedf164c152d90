import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.partition import partition, partition_by_time
from sarathi_pp.errors import PartitionError


@given(st.integers(1, 200), st.data())
def test_even_split_covers_every_layer_once_and_the_head_gets_no_extra(num_layers, data):
    stages = data.draw(st.integers(1, num_layers))
    ranges = partition(num_layers, stages)
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(num_layers))
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_given_split():
    assert partition(32, 4, (8, 8, 9, 7)) == ((0, 8), (8, 16), (16, 25), (25, 32))


@pytest.mark.parametrize(
    ("layers", "stages", "split", "says"),
    [
        (3, 4, None, "more than the model's 3 layers"),
        (8, 2, (4, 3), "adds up to 7"),
        (8, 2, (8, 0), "at least 1"),
        (8, 2, (4, 2, 2), "gives the layers of 3 stages"),
    ],
)
def test_errors_name_the_numbers(layers, stages, split, says):
    with pytest.raises(PartitionError, match=says):
        partition(layers, stages, split)


def slowest(layers, seconds):
    return max(seconds(stage, first, end) for stage, (first, end) in enumerate(layers))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 9), st.data())
def test_split_by_time_is_the_best_of_all(layer_times, embed, head, data):
    num_layers = len(layer_times)
    stages = data.draw(st.integers(1, num_layers))

    def seconds(stage, first, end):
        return float(sum(layer_times[first:end]) + embed * (first == 0) + head * (end == num_layers))

    found = partition_by_time(num_layers, stages, seconds)
    assert [layer for first, end in found for layer in range(first, end)] == list(range(num_layers))
    assert len(found) == stages and all(end > first for first, end in found)
    cuts = itertools.combinations(range(1, num_layers), stages - 1)
    every = (tuple(itertools.pairwise((0, *cut, num_layers))) for cut in cuts)
    assert slowest(found, seconds) == min(slowest(layers, seconds) for layers in every)


def first_of_all_pairs(num_layers, num_stages, seconds):
    """Return the split by time by its definition: compare every start of every stage."""

    def rank(share):
        return share[0], share[1], tuple(-cut for cut in share[2])

    best = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        shares = {}
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            found = []
            for first, (slowest_s, squares, cuts) in best.items():
                if first < end:
                    stage_s = seconds(stage, first, end)
                    found.append((max(slowest_s, stage_s), squares + stage_s**2, (*cuts, end)))
            shares[end] = min(found, key=rank)
        best = shares
    return tuple(itertools.pairwise(best[num_layers][2]))


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 9, 40]), min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 2, 3, 20]), min_size=12, max_size=12),
    st.integers(0, 9),
    st.integers(0, 40),
    st.data(),
)
def test_split_by_time_is_that_of_its_definition(layer_times, speeds, embed, head, data):
    num_layers = len(layer_times)
    stages = data.draw(st.integers(1, num_layers))

    def seconds(stage, first, end):
        return float(speeds[stage] * sum(layer_times[first:end]) + embed * (first == 0) + head * (end == num_layers))

    assert partition_by_time(num_layers, stages, seconds) == first_of_all_pairs(num_layers, stages, seconds)


@pytest.mark.parametrize(
    ("head", "slow_stage", "most_calls"), [(3, 1, 300_000), (30, 1, 2_000_000), (0, 50, 2_000_000)]
)
def test_a_thousand_layers_on_a_hundred_stages_are_few_questions(head, slow_stage, most_calls):
    """Comparing every start with every end would take 40 million calls."""
    calls = 0

    def seconds(stage, first, end):
        nonlocal calls
        calls += 1
        return (end - first) * (slow_stage if stage == 0 else 1.0) + head * (end == 1000)

    found = partition_by_time(1000, 100, seconds)
    assert len(found) == 100 and found[-1][1] == 1000
    assert slowest(found, seconds) == max(11, head + 1, slow_stage)
    assert calls < most_calls


@given(st.integers(1, 40), st.data())
def test_layers_alike_are_split_evenly(num_layers, data):
    stages = data.draw(st.integers(1, num_layers))
    assert partition_by_time(num_layers, stages, lambda stage, first, end: end - first) == partition(num_layers, stages)


def test_the_slowest_stage_counts_and_not_how_even_the_others_are():
    times = [3, 3, 3, 3, 4, 6, 1]
    found = partition_by_time(7, 5, lambda stage, first, end: float(sum(times[first:end])))
    assert slowest(found, lambda stage, first, end: sum(times[first:end])) == 6


def test_a_heavy_head_moves_layers_to_the_front():
    found = partition_by_time(16, 4, lambda stage, first, end: end - first + 3.0 * (end == 16))
    assert found == ((0, 5), (5, 10), (10, 15), (15, 16))


def test_a_slow_stage_gets_fewer_layers():
    found = partition_by_time(12, 3, lambda stage, first, end: (end - first) * (2.0 if stage == 1 else 1.0))
    assert found == ((0, 5), (5, 7), (7, 12))


def test_split_by_time_refuses_more_stages_than_layers():
    with pytest.raises(PartitionError, match="more than the model's 3 layers"):
        partition_by_time(3, 4, lambda stage, first, end: 1.0)


def test_even_is_a_split_of_its_own():
    assert partition(7, 2, "even") == partition(7, 2)
