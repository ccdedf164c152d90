"""A cost model that learns from each microbatch of a run.

Least squares on relative errors with coefficients of at least 0, each stage by itself. What it starts from is scaled to
the speed that the first microbatches show, and then counts as one observation of each coefficient alone: what
microbatches do not tell apart, with the noise they have, stays in its proportion. (Not scaled, an estimate ten times
too small would weigh, relative errors being what they are, a hundred times as much as what corrects it.) Old
observations fade, so that a machine that slows down is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sarathi_pp.core.cost.model import CostModel, Load, Row, StageCost


class CostRefiner:
    """Starts from `model`; every microbatch observed corrects it, once `model` is asked for again."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._stages = [_Regression(_coefficients(stage)) for stage in model.stages]
        # Taken in together: one by one, each would find its code and numbers out of the caches.
        self._observed: list[tuple[_Regression, Row, float]] = []

    @property
    def model(self) -> CostModel:
        """Solved anew every few microbatches."""
        if len(self._observed) >= _SOLVE_EVERY * len(self._stages):
            for regression, row, seconds in self._observed:
                regression.observe(row, seconds)
            self._observed.clear()
            solved = zip(self._model.stages, (regression.solve() for regression in self._stages), strict=True)
            stages = tuple(_with_coefficients(stage, values) for stage, values in solved)
            self._model = replace(self._model, stages=stages)
        return self._model

    def row(self, load: Load) -> Row:
        """Of a microbatch with that load, for `observe`: the same for all stages, so made once."""
        return self._model.row(load)

    def observe(self, stage: int, row: Row, seconds: float) -> None:
        """What a stage took for one microbatch; 0 says nothing."""
        if seconds > 0:
            self._observed.append((self._stages[stage], row, seconds))


class _Regression:
    """Weighted normal equations of one stage, kept as sums; solved by coordinate descent from the last solution.

    start: the coefficients it begins with. Old observations fade by the new ones' weight growing, which leaves the sums
    of the old ones alone.
    """

    def __init__(self, start: list[float]) -> None:
        self._values = start
        self._ratios: list[float] | None = []  # of observed to expected seconds, until they counted
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
        # Of relative errors: row and seconds are both divided by the seconds.
        share = self._weight / seconds
        self._target = [sum_ + share * part for sum_, part in zip(self._target, row, strict=True)]
        share /= seconds
        products = [left * right for left in row for right in row]
        self._gram = [sum_ + share * part for sum_, part in zip(self._gram, products, strict=True)]

    def _count_start(self, ratios: list[float]) -> None:
        """At the speed of the lower quartile: a span can be longer than its work for many reasons, shorter for none.

        A coefficient may be off by as much of itself as a span may, and by a little of a microbatch where it is small.
        One that no microbatch has shown yet is not held to what was thought of it: it will show.
        """
        speed = sorted(ratios)[len(ratios) // 4]
        size = len(self._values)
        self._values = [speed * value for value in self._values]
        for i, value in enumerate(self._values):
            square = self._gram[i * size + i]  # of the share of a microbatch for each unit of the coefficient, summed
            if square > 0:
                scale = max(value, _LITTLE * math.sqrt(len(ratios) / square))
                self._target[i] += self._weight * value / scale**2
                self._gram[i * size + i] += self._weight / scale**2

    def solve(self) -> list[float]:
        """The coefficients, at least 0 each."""
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


_FADE = 0.998
_MOST_WEIGHT = 1e9
_SOLVE_EVERY = 16
_SWEEPS = 12
# Of a microbatch's time.
_LITTLE = 0.1


def _coefficients(stage: StageCost) -> list[float]:
    return [stage.a0, stage.a1, stage.a2, stage.a3, stage.a4 + stage.head_s]


def _with_coefficients(stage: StageCost, values: Sequence[float]) -> StageCost:
    """The head's share of what a decode costs cannot be told from the rest; it stays what it was."""
    a0, a1, a2, a3, decode = values
    head_s = min(stage.head_s, decode)
    return replace(stage, a0=a0, a1=a1, a2=a2, a3=a3, a4=decode - head_s, head_s=head_s)
