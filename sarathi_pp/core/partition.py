"""Which layers each stage owns, as a pure function of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from sarathi_pp.errors import PartitionError

Layers = tuple[tuple[int, int], ...]
# By stage, and the layers [first, end) that it would have.
StageSeconds = Callable[[int, int, int], float]


def partition(num_layers: int, num_stages: int, split: Sequence[int] | Literal["even"] | None = None) -> Layers:
    """One [first, end) per stage, contiguous over [0, num_layers).

    Without a split the layers are shared out evenly; where that leaves a remainder the earlier stages take
    it, since the last one also has the head. Raises PartitionError with the numbers and what would fit.
    """
    _require_layers(num_layers, num_stages)
    if split is None or split == "even":
        share, extra = divmod(num_layers, num_stages)
        split = [share + (stage < extra) for stage in range(num_stages)]
    given = ",".join(map(str, split))
    if len(split) != num_stages:
        raise PartitionError(
            f"--layer-split {given} names {len(split)} stages, and the run has {num_stages}."
            f"\n  try  --stages {len(split)}, or {num_stages} numbers that add up to {num_layers}"
        )
    if sum(split) != num_layers or min(split) < 1:
        raise PartitionError(
            f"--layer-split {given} adds up to {sum(split)} layers with a smallest share of {min(split)}; the "
            f"model has {num_layers}, and each stage needs at least 1."
        )
    return tuple(pairwise([0, *accumulate(split)]))


def partition_by_time(num_layers: int, num_stages: int, seconds: StageSeconds) -> Layers:
    """The contiguous split whose slowest stage takes least; among equals, one whose stages differ little.

    seconds: what a stage with such layers takes.
    Raises PartitionError where there are fewer layers than stages.
    """
    _require_layers(num_layers, num_stages)
    # By end: the best way to share the layers [0, end) out over the stages so far.
    best = {0: _Share(0.0, 0.0, (0,))}
    for stage in range(1, num_stages + 1):
        last_end = num_layers - (num_stages - stage)
        best = {
            end: min(
                (one.followed_by(end, seconds(stage - 1, first, end)) for first, one in best.items() if first < end),
                key=_Share.rank,
            )
            for end in range(stage, last_end + 1)
        }
    return tuple(pairwise(best[num_layers].cuts))


class _Share(NamedTuple):
    """Layers shared out so far: the slowest stage's time, the sum of squared times, and where the cuts are."""

    slowest_s: float
    squares: float
    cuts: tuple[int, ...]

    def followed_by(self, end: int, stage_s: float) -> _Share:
        return _Share(max(self.slowest_s, stage_s), self.squares + stage_s**2, (*self.cuts, end))

    def rank(self) -> tuple[float, float, tuple[int, ...]]:
        """Squares are least where times are equal; then the earlier stages take more, as in an even split."""
        return self.slowest_s, self.squares, tuple(-cut for cut in self.cuts)


def _require_layers(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        raise PartitionError(
            f"{num_stages} stages are more than the model's {num_layers} layers: a stage would own no layer."
            f"\n  given  --stages {num_stages}        try  --stages {num_layers} or fewer"
        )
