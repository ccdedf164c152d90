"""A cost model that learns from each microbatch of a run.

Least squares on relative errors with coefficients of at least 0, each stage by itself. What it starts from counts as a
few observations of it, made on a machine as fast as the first microbatches show this one to be: relative errors weigh
an estimate that is ten times too small a hundred times as much as what corrects it. Old observations fade, so that a
machine that slows down is noticed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from sarathi_pp.core.cost import CostModel, Load, StageCost


class CostRefiner:
    """Starts from `model`; every microbatch observed corrects it."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        typical = [model.row(load) for load in _TYPICAL_LOADS]
        self._stages = [_Regression(_coefficients(stage), typical) for stage in model.stages]
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

    start: the coefficients it begins with, typical: the rows that count as observed with them. Old observations fade by
    the new ones' weight growing, which leaves the sums of the old ones alone.
    """

    def __init__(self, start: list[float], typical: Sequence[Sequence[float]]) -> None:
        self._values = start
        self._typical = typical
        self._log_ratios: list[float] | None = []  # of observed to expected seconds, until it was solved once
        self._gram = [[0.0] * len(start) for _ in start]
        self._target = [0.0] * len(start)
        self._weight = 1.0

    def observe(self, row: Sequence[float], seconds: float) -> None:
        if seconds <= 0:
            return
        expected_s = _dot(self._values, row)
        if self._log_ratios is not None and expected_s > 0:
            self._log_ratios.append(math.log(seconds / expected_s))
        self._add(row, seconds)

    def _add(self, row: Sequence[float], seconds: float) -> None:
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
        if self._log_ratios is not None:
            self._start_at(math.exp(statistics.fmean(self._log_ratios or [0.0])))
            self._log_ratios = None
        values = self._values
        for _ in range(_SWEEPS):
            for i, gram in enumerate(self._gram):
                if gram[i] > 0:
                    off = self._target[i]
                    for weight, value in zip(gram, values, strict=True):
                        off -= weight * value
                    values[i] = max(0.0, values[i] + off / gram[i])
        return values

    def _start_at(self, ratio: float) -> None:
        """Count what it begins with as observed on a machine that takes so many times as long."""
        self._values = [ratio * value for value in self._values]
        for row in self._typical:
            expected_s = _dot(self._values, row)
            if expected_s > 0:
                self._add(row, expected_s)


def _dot(values: Sequence[float], row: Sequence[float]) -> float:
    return sum(value * part for value, part in zip(values, row, strict=True))


_FADE = 0.998
_MOST_WEIGHT = 1e9
_SOLVE_EVERY = 16
_SWEEPS = 12
# What a starting model is asked about: chunks early and late in a prompt, decodes alone, both together.
_TYPICAL_LOADS = (
    Load(128, 128 * 64, 0, 0),
    Load(512, 512 * 256, 0, 0),
    Load(512, 512 * 2048, 0, 0),
    Load(0, 0, 8, 8 * 256),
    Load(0, 0, 32, 32 * 1024),
    Load(224, 224 * 512, 32, 32 * 512),
)


def _coefficients(stage: StageCost) -> list[float]:
    return [stage.a0, stage.a1, stage.a2, stage.a3, stage.a4 + stage.head_s]


def _with_coefficients(stage: StageCost, values: Sequence[float]) -> StageCost:
    """The head's share of what a decode costs cannot be told from the rest; it stays what it was."""
    a0, a1, a2, a3, decode = values
    head_s = min(stage.head_s, decode)
    return replace(stage, a0=a0, a1=a1, a2=a2, a3=a3, a4=decode - head_s, head_s=head_s)
