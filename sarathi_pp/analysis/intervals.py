"""Sets of instants as sorted, disjoint [begin, end) pairs. Every operation is exact and linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals. They may be in any order, overlap or be empty. Sorted input takes linear time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the instants that are in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals, in seconds."""
    return sum(end - begin for begin, end in intervals)


def positions_within(instants: Sequence[float], intervals: Sequence[Interval]) -> list[int]:
    """Return the indices of the instants that are inside one of the intervals. The instants must be sorted."""
    inside: list[int] = []
    i = 0
    for position, instant in enumerate(instants):
        while i < len(intervals) and intervals[i][1] <= instant:
            i += 1
        if i < len(intervals) and intervals[i][0] <= instant:
            inside.append(position)
    return inside
