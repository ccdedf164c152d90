"""The cost model of a run, fitted to the compute spans that its stages recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sarathi_pp.core.cost import CostModel, Load, StageCost
from sarathi_pp.trace.timeline import StageTimeline, Timeline

# Tokens that linear layers may take at once; 1 is plain proportionality.
_TILES = (1, 16, 32, 64, 128, 256)
# Fewer microbatches than this say nothing about five coefficients.
_LEAST_SPANS = 8

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """error: mean over spans of |modelled - measured| / measured."""

    model: CostModel
    error: float


def fit_cost(timeline: Timeline) -> Fit | None:
    """Non-negative least squares on relative errors, a stage at a time, with the tile that fits best.

    None for a run with fewer than 8 microbatches. Coefficients of what never varied are as good as arbitrary:
    the model interpolates within what the run has seen.
    """
    count = timeline.num_returned
    if count < _LEAST_SPANS:
        return None
    loads = [event.load for event in timeline.issued[:count]]
    measured = [_seconds(stage, count) for stage in timeline.stages]
    fits = [_fit_with_tile(tile, loads, measured, timeline) for tile in _TILES]
    return min(fits, key=lambda fit: fit.error)


def _seconds(stage: StageTimeline, count: int) -> Matrix:
    """Span lengths; a span too short for the clock counts as one of its ticks."""
    lengths = np.array(stage.ends[:count]) - np.array(stage.starts[:count])
    positive: Matrix = np.maximum(lengths, 1e-9)
    return positive


def _fit_with_tile(tile: int, loads: list[Load], measured: list[Matrix], timeline: Timeline) -> Fit:
    design = np.array([_row(load, tile) for load in loads])
    # Columns differ by many orders of magnitude: on one scale the solver stops where it should.
    scale = np.maximum(design.max(axis=0), 1e-30)
    stages: list[StageCost] = []
    errors: list[float] = []
    for stage, seconds in zip(timeline.stages, measured, strict=True):
        weighted = design / scale / seconds[:, None]
        coefficients = nnls(weighted, np.ones(len(seconds)))[0] / scale
        errors.append(float(np.abs(design @ coefficients / seconds - 1).mean()))
        values: list[Any] = coefficients.tolist()
        stages.append(StageCost(stage.start.layers, *values))
    return Fit(CostModel(tile, tuple(stages)), sum(errors) / len(errors))


def _row(load: Load, tile: int) -> list[float]:
    return [1.0, -(-load.num_tokens // tile), load.prefill_attention, load.decode_context, load.decodes]
