"""The fit finds the cost model that made the spans."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sarathi_pp.bench.profile import fit_cost
from sarathi_pp.core.cost import CostModel, Load, StageCost
from tests.trace.test_causes import Run


def model(tile: int) -> CostModel:
    stages = [StageCost((s, s + 1), 1e-3 * (s + 1), 2e-4 * tile, 4e-7, 1e-6, 6e-4) for s in range(3)]
    return CostModel(tile, tuple(stages))


def some_loads(count: int, seed: int) -> list[Load]:
    draw = random.Random(seed)
    loads = []
    for _ in range(count):
        prefill, behind, decodes = draw.choice([0, draw.randint(1, 400)]), draw.randint(0, 2000), draw.randint(1, 20)
        context = sum(draw.randint(100, 3000) for _ in range(decodes))
        loads.append(Load(prefill, prefill * behind + prefill**2 / 2, decodes, context))
    return loads


@pytest.mark.parametrize("tile", [1, 64, 128])
def test_exact_spans_give_the_model_back(tile: int) -> None:
    true = model(tile)
    fit = fit_cost(Run(some_loads(80, 0), true, 3).timeline())
    assert fit is not None and fit.error < 1e-6 and fit.model.tile == tile
    for found, expected in zip(fit.model.stages, true.stages, strict=True):
        assert found.layers == (4 * expected.layers[0], 4 * expected.layers[0] + 4)  # as the traces say
        names = ("a0", "a1", "a2", "a3", "a4")
        np.testing.assert_allclose(
            [getattr(found, name) for name in names], [getattr(expected, name) for name in names], rtol=1e-4
        )


def test_noise_of_five_percent_is_about_the_error_and_unseen_loads_are_met() -> None:
    true = model(1)
    draw = random.Random(1)
    loads = some_loads(300, 2)
    noise = {(m, s): draw.gauss(0, 0.05) for m in range(len(loads)) for s in range(3)}
    run = Run(loads, true, 3, jitter=lambda m, s: noise[m, s] * true.seconds(s, loads[m]))
    fit = fit_cost(run.timeline())
    assert fit is not None and 0.03 < fit.error < 0.05  # the mean of |N(0, 0.05)| is 0.04
    for load in some_loads(50, 3):
        assert fit.model.seconds(2, load) == pytest.approx(true.seconds(2, load), rel=0.05)


def test_coefficients_are_never_negative() -> None:
    draw = random.Random(4)
    run = Run(some_loads(30, 5), model(1), 3, jitter=lambda m, s: draw.uniform(0, 0.2))
    fit = fit_cost(run.timeline())
    assert fit is not None
    assert all(min(stage.a0, stage.a1, stage.a2, stage.a3, stage.a4) >= 0 for stage in fit.model.stages)


def test_equal_microbatches_are_fitted_though_nothing_varies() -> None:
    fit = fit_cost(Run([Load(256, 32768.0, 0, 0)] * 20, model(1), 3).timeline())
    assert fit is not None and fit.error < 1e-9


@pytest.mark.parametrize(("count", "fitted"), [(7, False), (8, True)])
def test_too_few_microbatches_give_no_model(count: int, fitted: bool) -> None:
    assert (fit_cost(Run(some_loads(count, 6), model(1), 3).timeline()) is not None) == fitted
