"""The split of a model's layers over the stages of a pipeline, computed from numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

from sarathi_pp.errors import PartitionError

# The layers [first, end) of each stage, first stage first.
Layers = tuple[tuple[int, int], ...]
# A function (stage, first, end) that gives the seconds per microbatch of a stage with the layers [first, end).
StageSeconds = Callable[[int, int, int], float]

# Steps of the bisection in `_attained_s`. After 50 of them, its limit exceeds the least one only by a rounding error.
_BISECTIONS = 50


def partition(num_layers: int, num_stages: int, split: Sequence[int] | Literal["even"] | None = None) -> Layers:
    """Return the layers [first, end) of each stage, contiguous over [0, num_layers).

    Args:
        split: layers per stage. None and "even" divide the layers evenly. The earlier stages then take the remainder,
            since the last stage also has the LM head.

    Raises:
        PartitionError: the numbers do not fit each other. The message gives them and numbers that would fit.
    """
    _require_layers(num_layers, num_stages)
    if split is None or split == "even":
        share, extra = divmod(num_layers, num_stages)
        split = [share + (stage < extra) for stage in range(num_stages)]
    given = ",".join(map(str, split))
    if len(split) != num_stages:
        raise PartitionError(
            f"--layer-split {given} gives the layers of {len(split)} stages, but the run has {num_stages} stages."
            f"\n  try  --stages {len(split)}, or a --layer-split of {num_stages} numbers that add up to {num_layers}"
        )
    if sum(split) != num_layers or min(split) < 1:
        raise PartitionError(
            f"--layer-split {given} adds up to {sum(split)} layers, and its smallest number is {min(split)}. The "
            f"numbers must add up to the model's {num_layers} layers, and each must be at least 1."
        )
    return tuple(pairwise([0, *accumulate(split)]))


def partition_by_time(num_layers: int, num_stages: int, seconds: StageSeconds) -> Layers:
    """Return the contiguous split with the least time of the slowest stage.

    If several splits have the same slowest time, return one whose stages take similar times.

    Args:
        seconds: gives the time of a stage with these layers. It must not fall if a layer is added at either end.

    Raises:
        PartitionError: there are fewer layers than stages.
    """
    _require_layers(num_layers, num_stages)
    limit_s = _attained_s(num_layers, num_stages, seconds)
    starts = _least_starts(num_layers, num_stages, seconds, limit_s)
    # Key: end. Value: the best way to divide the layers [0, end) among the stages of the loop so far.
    best = {0: _Share(0.0, 0.0, (0,))}
    for stage in range(num_stages):
        last_end = num_layers - (num_stages - stage - 1)
        best = dict(_best_shares(best, range(starts[stage + 1], last_end + 1), partial(seconds, stage), limit_s))
    return tuple(pairwise(best[num_layers].cuts))


class _Share(NamedTuple):
    """A way to divide the first layers of the model among its first stages.

    Attributes:
        slowest_s: time of the slowest of these stages.
        squares: sum of the squared times of these stages.
        cuts: 0, then the end of each stage's layers.
    """

    slowest_s: float
    squares: float
    cuts: tuple[int, ...]


def _best_shares(
    best: Mapping[int, _Share], ends: range, seconds: Callable[[int, int], float], limit_s: float
) -> Iterator[tuple[int, _Share]]:
    """Add one stage to the shares. Yield each end that the stage can reach within `limit_s`, with the best share.

    The best share has the least time of the slowest stage. If these are equal, the least sum of squares is best. If the
    sums are equal too, the earlier stages take more layers, as in an even split.

    Args:
        best: by end, the best share of the stages before.
        ends: ends that the new stage may have.
        seconds: gives the time of the new stage with the layers [first, end).
    """
    lowest, highest = min(best), max(best)
    slowest = {first: share.slowest_s for first, share in best.items()}
    squares = {first: share.squares for first, share in best.items()}
    for end in ends:
        # The slowest time and the sum of squares with the best start so far, which is `chosen`.
        slowest_s, least, chosen = limit_s, inf, -1
        for first in range(min(end - 1, highest), lowest - 1, -1):
            stage_s = seconds(first, end)
            if stage_s > slowest_s:
                break  # with an earlier start the stage takes no less
            before_s = slowest.get(first, inf)
            if before_s > slowest_s:
                continue
            found_s, found = max(before_s, stage_s), squares[first] + stage_s * stage_s
            better = found_s < slowest_s or found < least
            if better or (found == least and best[first].cuts > best[chosen].cuts):
                slowest_s, least, chosen = found_s, found, first
        if chosen >= 0:
            yield end, _Share(slowest_s, least, (*best[chosen].cuts, end))
            # A larger end has no earlier best start, since squares of sums are convex (Yao, STOC 1980).
            lowest = chosen


def _attained_s(num_layers: int, num_stages: int, seconds: StageSeconds) -> float:
    """Return the time of the slowest stage in the best split that `_slowest_if_filled` makes, in seconds.

    Bisection finds the limit that gives this split. The best of all splits is not slower. So the search can skip every
    stage that takes longer than the returned time.
    """
    low = 0.0
    high = max(seconds(stage, *span) for stage, span in enumerate(partition(num_layers, num_stages)))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _slowest_if_filled(num_layers, num_stages, seconds, middle)
        low, high = (low if found <= middle else middle), min(found, high)
    return high


def _slowest_if_filled(num_layers: int, num_stages: int, seconds: StageSeconds, limit_s: float) -> float:
    """Return the time of the slowest stage, in seconds, if stages are filled one after the other.

    Each stage takes as many layers as fit `limit_s`, at least one. The last stage takes all that are left.
    """
    slowest_s, first = 0.0, 0
    for stage in range(num_stages - 1):
        end = first + 1
        while end < num_layers - (num_stages - stage - 1) and seconds(stage, first, end + 1) <= limit_s:
            end += 1
        slowest_s, first = max(slowest_s, seconds(stage, first, end)), end
    return max(slowest_s, seconds(num_stages - 1, first, num_layers))


def _least_starts(num_layers: int, num_stages: int, seconds: StageSeconds, limit_s: float) -> list[int]:
    """Return the smallest first layer of each stage with which it and all later stages stay within `limit_s`.

    The last entry is the number of layers.
    """
    starts = [num_layers]
    for stage in reversed(range(num_stages)):
        start = starts[-1]
        while start > stage and seconds(stage, start - 1, starts[-1]) <= limit_s:
            start -= 1
        starts.append(start)
    return starts[::-1]


def _require_layers(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        raise PartitionError(
            f"{num_stages} stages are more than the model's {num_layers} layers: a stage would own no layer."
            f"\n  given  --stages {num_stages}        try  --stages {num_layers} or fewer"
        )
