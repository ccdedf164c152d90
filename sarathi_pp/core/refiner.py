"""A cost model that learns from each microbatch of a run.

Least squares on relative errors with coefficients of at least 0, each stage by itself. What it starts from is scaled to
the speed that the first microbatches show, and after that is only where the search begins: what no microbatch tells
apart stays in its proportion. (Counted as observations, relative errors would weigh an estimate ten times too small a
hundred times as much as what corrects it.) Old observations fade, so that a machine that slows down is noticed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from sarathi_pp.core.cost import CostModel, Load, StageCost


class CostRefiner:
    """Starts from `model`; every microbatch observed corrects it."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._stages = [_Regression(_coefficients(stage)) for stage in model.stages]
        self._since = 0

    @property
    def model(self) -> CostModel:
        """Solved anew every few microbatches."""
        if self._since >= _SOLVE_EVERY * len(self._stages):
            self._since = 0
            solved = zip(self._model.stages, (regression.solve() for regression in self._stages), strict=True)
            stages = tuple(_with_coefficients(stage, values) for stage, values in solved)
            self._model = CostModel(self._model.tile, stages)
        return self._model

    def observe(self, stage: int, load: Load, seconds: float) -> None:
        """What a stage took for one microbatch; 0 says nothing."""
        self._stages[stage].observe(self._model.row(load), seconds)
        self._since += 1


class _Regression:
    """Weighted normal equations of one stage, kept as sums; solved by coordinate descent from the last solution.

    start: the coefficients it begins with. Old observations fade by the new ones' weight growing, which leaves the sums
    of the old ones alone.
    """

    def __init__(self, start: list[float]) -> None:
        self._values = start
        self._ratios: list[float] | None = []  # of observed to expected seconds, until it was solved once
        self._gram = [[0.0] * len(start) for _ in start]
        self._target = [0.0] * len(start)
        self._weight = 1.0

    def observe(self, row: Sequence[float], seconds: float) -> None:
        if seconds <= 0:
            return
        expected_s = sum(value * part for value, part in zip(self._values, row, strict=True))
        if self._ratios is not None and expected_s > 0:
            self._ratios.append(seconds / expected_s)
        self._weight /= _FADE
        if self._weight > _MOST_WEIGHT:
            self._target = [value / self._weight for value in self._target]
            self._gram = [[value / self._weight for value in gram] for gram in self._gram]
            self._weight = 1.0
        share = self._weight / seconds
        for i, value in enumerate(row):
            if value:
                left = share * value
                self._target[i] += left
                left /= seconds
                gram = self._gram[i]
                for j, right in enumerate(row):
                    gram[j] += left * right

    def solve(self) -> list[float]:
        """The coefficients, at least 0 each."""
        if self._ratios is not None:
            speed = statistics.median(self._ratios or [1.0])
            self._values = [speed * value for value in self._values]
            self._ratios = None
        values = self._values
        for _ in range(_SWEEPS):
            for i, gram in enumerate(self._gram):
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


def _coefficients(stage: StageCost) -> list[float]:
    return [stage.a0, stage.a1, stage.a2, stage.a3, stage.a4 + stage.head_s]


def _with_coefficients(stage: StageCost, values: Sequence[float]) -> StageCost:
    """The head's share of what a decode costs cannot be told from the rest; it stays what it was."""
    a0, a1, a2, a3, decode = values
    head_s = min(stage.head_s, decode)
    return replace(stage, a0=a0, a1=a1, a2=a2, a3=a3, a4=decode - head_s, head_s=head_s)
