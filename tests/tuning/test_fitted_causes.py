"""Causes in a report: found by a model that was fitted to the same run, not by the model that made it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from sarathi_pp.analysis.causes import Causes, explain
from sarathi_pp.core.cost.model import Load
from sarathi_pp.tuning.fit import fit_cost
from tests.analysis.test_causes import CHUNK, DECODES, Run, cost, share

COUNT = 60
MIXED = [CHUNK if index % 3 == 0 else DECODES for index in range(COUNT)]


def fitted_causes(run: Run) -> Causes:
    timeline = run.timeline()
    fit = fit_cost(timeline)
    assert fit is not None
    return explain(timeline, fit.model)


def chunks_of_different_length(stages: int) -> Run:
    draw = random.Random(1)
    loads = [Load(n, n * n / 2, 0, 0) for n in (draw.randint(32, 1024) for _ in range(COUNT))]
    return Run(loads, cost(stages), stages)


def decodes_with_different_context(stages: int) -> Run:
    draw = random.Random(2)
    loads = [replace(DECODES, decode_context=draw.randint(100, 60_000)) for _ in range(COUNT)]
    return Run(loads, cost(stages), stages)


CASES: dict[str, Callable[[int], Run]] = {
    "prefill_variance_s": chunks_of_different_length,
    "prefill_decode_s": lambda stages: Run(MIXED, cost(stages), stages),
    "decode_context_s": decodes_with_different_context,
    "stage_imbalance_s": lambda stages: Run([CHUNK] * COUNT, cost(stages, lambda s: 1.5 if s == 1 else 1.0), stages),
    "communication_s": lambda stages: Run([CHUNK] * COUNT, cost(stages), stages, transfer=lambda m, s: 5e-3),
    "host_s": lambda stages: Run([CHUNK] * COUNT, cost(stages), stages, host=lambda m, s: 0.0 if s else 3e-3),
    "starvation_s": lambda stages: Run([CHUNK] * COUNT, cost(stages), stages, arrives=lambda m: 0.2 * m),
}


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("cause", CASES)
def test_a_run_with_one_cause_is_attributed_to_it_by_its_own_fit(cause: str, stages: int) -> None:
    assert share(fitted_causes(CASES[cause](stages)), cause) >= 0.95


@pytest.mark.parametrize("cause", CASES)
def test_noise_of_the_spans_takes_little_from_the_cause_that_there_is(cause: str) -> None:
    """3 % of a microbatch is a bubble too, without a cause. Delays of 5 % must still dominate."""
    run = CASES[cause](4)
    draw = random.Random(5)
    noise = {(m, s): draw.gauss(0, 0.03) * run.model.seconds(s, run.loads[m]) for m in range(COUNT) for s in range(4)}
    run.jitter = lambda m, s: noise[m, s]
    found = asdict(fitted_causes(run))
    del found["ramp_s"], found["unexplained_s"]
    assert max(found, key=lambda name: found[name]) == cause
    assert found[cause] >= 0.7 * sum(abs(seconds) for seconds in found.values())
