"""A cost model that learns from each microbatch of a run.

Each stage has a least-squares fit of its own, on relative errors, with coefficients of at least 0. It starts from the
coefficients of a profile or an estimate. With them it does two things:

    scale      One factor adapts all of them to the speed that the first microbatches show. Errors are relative, so
               without this an estimate ten times too small would weigh a hundred times as much as its corrections.
    count      Each counts as one observation of its coefficient. So two coefficients that noisy microbatches cannot
               tell apart keep the proportion that they had.

Old observations count less and less, so that the model notices a machine that slows down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sarathi_pp.core.cost.model import CostModel, Load, Row, StageCost


class CostRefiner:
    """A cost model that starts from a given one. The times of observed microbatches correct it."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._stages = [_Regression(_coefficients(stage)) for stage in model.stages]
        # Observations are collected and then processed together. If each were processed when it comes, neither the code
        # nor the numbers would be in the CPU's caches.
        self._observed: list[tuple[_Regression, Row, float]] = []

    @property
    def model(self) -> CostModel:
        """Return the current model. It is computed again every _SOLVE_EVERY microbatches."""
        if len(self._observed) >= _SOLVE_EVERY * len(self._stages):
            for regression, row, seconds in self._observed:
                regression.observe(row, seconds)
            self._observed.clear()
            solved = zip(self._model.stages, (regression.solve() for regression in self._stages), strict=True)
            stages = tuple(_with_coefficients(stage, values) for stage, values in solved)
            self._model = replace(self._model, stages=stages)
        return self._model

    def row(self, load: Load) -> Row:
        """Return the factors of the coefficients for a microbatch with that load, for `observe`.

        They are the same for all stages, so one call per microbatch is enough.
        """
        return self._model.row(load)

    def observe(self, stage: int, row: Row, seconds: float) -> None:
        """Record the time of a microbatch on a stage.

        Args:
            stage: index of the stage, from 0.
            row: the microbatch's factors.
            seconds: 0 if the time is unknown.
        """
        if seconds > 0:
            self._observed.append((self._stages[stage], row, seconds))


class _Regression:
    """The weighted least-squares fit of one stage: its normal equations, kept as sums.

    Coordinate descent solves them, starting from the last solution. Old observations count less and less, because the
    weight of each new one is larger. So the sums of the old ones need no change.

    Args:
        start: the coefficients at the start.
    """

    def __init__(self, start: list[float]) -> None:
        self._values = start
        self._ratios: list[float] | None = []  # of observed to expected seconds, until `start` is counted
        self._gram = [0.0] * len(start) ** 2  # row by row
        self._target = [0.0] * len(start)
        self._weight = 1.0

    def observe(self, row: Row, seconds: float) -> None:
        if self._ratios is not None:
            expected_s = sum(value * part for value, part in zip(self._values, row, strict=True))
            if expected_s > 0:
                self._ratios.append(seconds / expected_s)
        self._weight /= _FADE
        if self._weight > _MOST_WEIGHT:
            self._target = [value / self._weight for value in self._target]
            self._gram = [value / self._weight for value in self._gram]
            self._weight = 1.0
        # Errors are relative, so row and seconds are both divided by the seconds.
        share = self._weight / seconds
        self._target = [sum_ + share * part for sum_, part in zip(self._target, row, strict=True)]
        share /= seconds
        products = [left * right for left in row for right in row]
        self._gram = [sum_ + share * part for sum_, part in zip(self._gram, products, strict=True)]

    def _count_start(self, ratios: list[float]) -> None:
        """Scale the coefficients at the start to the machine's speed, and count each as one observation.

        The speed is the lower quartile of `ratios`, which are observed to expected seconds. A measured time can be
        longer than its work for many reasons, but never shorter.

        A coefficient at the start counts as if it had the same relative error as a measured time. A small coefficient
        counts as if its effect could be wrong by the share _LITTLE of a microbatch's time. A coefficient that had no
        effect in any microbatch yet is not counted, so later microbatches decide it alone.
        """
        speed = sorted(ratios)[len(ratios) // 4]
        size = len(self._values)
        self._values = [speed * value for value in self._values]
        for i, value in enumerate(self._values):
            # Sum over the microbatches: share of the time per unit of the coefficient, squared.
            square = self._gram[i * size + i]
            if square > 0:
                scale = max(value, _LITTLE * math.sqrt(len(ratios) / square))
                self._target[i] += self._weight * value / scale**2
                self._gram[i * size + i] += self._weight / scale**2

    def solve(self) -> list[float]:
        """Return the coefficients, each at least 0."""
        if self._ratios:
            self._count_start(self._ratios)
            self._ratios = None
        values = self._values
        size = len(values)
        rows = [self._gram[i * size : (i + 1) * size] for i in range(size)]
        for _ in range(_SWEEPS):
            for i, gram in enumerate(rows):
                if gram[i] > 0:
                    off = self._target[i]
                    for weight, value in zip(gram, values, strict=True):
                        off -= weight * value
                    values[i] = max(0.0, values[i] + off / gram[i])
        return values


# Weight of an observation relative to the next one.
_FADE = 0.998
# If the weight of an observation exceeds this, all sums are divided by it, and the weight is 1 again.
_MOST_WEIGHT = 1e9
# Microbatches after which the coefficients are computed again.
_SOLVE_EVERY = 16
# Rounds of coordinate descent, each over all coefficients.
_SWEEPS = 12
# Share of a microbatch's time by which a small coefficient may be wrong at the start.
_LITTLE = 0.1


def _coefficients(stage: StageCost) -> list[float]:
    return [stage.a0, stage.a1, stage.a2, stage.a3, stage.a4 + stage.head_s]


def _with_coefficients(stage: StageCost, values: Sequence[float]) -> StageCost:
    """Return the stage with these coefficients.

    The fit gives a4 and head_s as one sum, because it cannot separate them. So head_s stays as it was, up to this sum.
    """
    a0, a1, a2, a3, decode = values
    head_s = min(stage.head_s, decode)
    return replace(stage, a0=a0, a1=a1, a2=a2, a3=a3, a4=decode - head_s, head_s=head_s)
