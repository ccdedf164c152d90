from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis.intervals import Interval, intersect, length, merge, positions_within

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def instants(intervals: list[Interval]) -> set[int]:
    """Return the set as unit cells: the ends are whole numbers."""
    return {cell for begin, end in intervals for cell in range(int(begin), int(end))}


@given(pairs)
def test_merge_is_the_sorted_disjoint_union(intervals: list[Interval]) -> None:
    merged = merge(intervals)
    assert instants(merged) == instants(intervals)
    assert all(begin < end for begin, end in merged)
    assert all(left[1] < right[0] for left, right in zip(merged, merged[1:], strict=False))
    assert length(merged) == len(instants(intervals))


@given(pairs, pairs)
def test_intersection_holds_what_both_hold(left: list[Interval], right: list[Interval]) -> None:
    common = intersect(merge(left), merge(right))
    assert instants(common) == instants(left) & instants(right)
    assert length(common) == len(instants(left) & instants(right))


@given(st.lists(st.integers(0, 30)).map(sorted), pairs)
def test_positions_within(points: list[int], intervals: list[Interval]) -> None:
    inside = instants(intervals)
    expected = [position for position, point in enumerate(points) if point in inside]
    assert positions_within(points, merge(intervals)) == expected
