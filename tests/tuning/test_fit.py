"""The fit finds the cost model that made the spans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.request_index import NEXT_CHOICE
from sarathi_pp.trace.events import Issued, RequestArrived
from sarathi_pp.tuning.fit import Spans, _fit_edge, _Transfers, assess, fit_cost, fit_spans
from tests.analysis.test_causes import Run


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
        assert found.layers == (4 * expected.layers[0], 4 * expected.layers[0] + 4)  # as in the traces
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


def spans_of(true: CostModel, loads: list[Load], sampled: list[int] | None = None) -> Spans:
    """Make exact spans. Rows that sample cost head_s each, whether they decode or end a prompt."""
    rows = np.array([load.decodes for load in loads] if sampled is None else sampled, dtype=float)
    ended = rows - np.array([load.decodes for load in loads])
    seconds = [np.array([true.seconds(s, load) for load in loads]) for s in range(len(true.stages))]
    seconds[-1] = seconds[-1] + true.stages[-1].head_s * ended
    return Spans(loads, rows, seconds, [stage.layers for stage in true.stages])


def test_a_few_disturbed_spans_change_nothing() -> None:
    true, loads = model(1), some_loads(200, 7)
    spans = spans_of(true, loads)
    draw = random.Random(8)
    for seconds in spans.seconds:
        seconds[draw.sample(range(200), 12)] *= 5
    found = fit_spans(spans)
    for load in some_loads(20, 9):
        assert found.seconds(1, load) == pytest.approx(true.seconds(1, load), rel=0.01)


@pytest.mark.parametrize("tile", [1, 32, 64, 128])
def test_the_tile_is_found_among_noise(tile: int) -> None:
    spans = spans_of(model(tile), some_loads(250, 10))
    noise = np.random.default_rng(11)
    noisy = replace(spans, seconds=[s * noise.normal(1, 0.03, len(s)) for s in spans.seconds])
    found = fit_spans(noisy)
    assert (found.tile, found.ridge) == (tile, 0)


def test_where_the_tile_makes_no_difference_it_is_the_smallest() -> None:
    """There are only whole tiles of 256: every tile that divides 256 fits equally well."""
    loads = [Load(256 * n, 1000.0 * n * n, 0, 0) for n in (1, 2, 3, 4, 5, 6, 7, 8)] * 3
    assert fit_spans(spans_of(model(1), loads)).tile == 1


@pytest.mark.parametrize("ridge", [0, 8, 16])
def test_what_few_tokens_cost_like_some_more_is_a_ridge_and_no_tile(ridge: int) -> None:
    spans = spans_of(replace(model(1), ridge=ridge), some_loads(250, 12))
    noise = np.random.default_rng(13)
    found = fit_spans(replace(spans, seconds=[s * noise.normal(1, 0.01, len(s)) for s in spans.seconds]))
    assert (found.tile, found.ridge) == (1, ridge)


def test_the_head_is_what_a_decode_costs_more_on_the_last_stage() -> None:
    stages = (
        StageCost((0, 4), 1e-3, 2e-4, 4e-7, 1e-6, 4e-4),
        StageCost((4, 6), 1e-3, 1e-4, 2e-7, 5e-7, 2e-4, head_s=7e-4),
    )
    found = fit_spans(spans_of(CostModel(1, stages), some_loads(100, 12)))
    assert found.stages[0].head_s == 0.0 and found.stages[0].a4 == pytest.approx(4e-4, rel=1e-3)
    assert found.stages[1].a4 == pytest.approx(2e-4, rel=1e-3)  # half the layers of the other
    assert found.stages[1].head_s == pytest.approx(7e-4, rel=1e-3)


def test_a_single_stage_asks_prompts_that_end_without_a_decode() -> None:
    true = CostModel(1, (StageCost((0, 4), 1e-3, 2e-4, 4e-7, 1e-6, 4e-4, head_s=7e-4),))
    draw = random.Random(13)
    prefills = [Load(n, n * n / 2, 0, 0) for n in (draw.randint(20, 300) for _ in range(60))]
    ended = [draw.choice([0, 0, 1, 4, 16]) for _ in prefills]
    loads = [*some_loads(80, 14), *prefills]
    found = fit_spans(spans_of(true, loads, [*(load.decodes for load in loads[:80]), *ended])).stages[0]
    # The model charges the head only for decodes, so prompts that end add slight noise elsewhere.
    assert found.head_s == pytest.approx(7e-4, rel=1e-3) and found.a4 == pytest.approx(4e-4, rel=0.05)
    nothing_said = fit_spans(spans_of(true, some_loads(80, 15))).stages[0]
    assert nothing_said.head_s == 0.0 and nothing_said.a4 == pytest.approx(11e-4, rel=1e-3)


def test_rows_that_sample_are_read_off_the_schedule() -> None:
    timeline = Run(some_loads(3, 16), model(1), 3).timeline()  # requests of 10 tokens
    texts = ["m0[s0:0+10 s1:0+4]", "m1[s1.1:4+6 s2:0+9]", "m2[d s0:10]"]
    issued = (
        replace(event, text=text, decodes=decodes)
        for event, text, decodes in zip(timeline.issued, texts, (0, 0, 1), strict=True)
    )
    timeline.issued = Log(Issued, issued)
    assert Spans.of(timeline).sampled.tolist() == [1, 1, 1]


def test_the_prompt_of_another_choice_ends_by_its_own_name() -> None:
    """A request's second choice has an index of its own. Here it also has another length than the first."""
    timeline = Run(some_loads(4, 16), model(1), 3).timeline()
    texts = ["m0[s1/1:0+10 s1:0+4]", "m1[s1/1.2:10+2 s1:4+6]", "m2[s1/1:0+12 | d s1:10]", "m3[s2/1:0+10 s11:0+12]"]
    issued = (
        replace(event, text=text, decodes=text.count("d")) for event, text in zip(timeline.issued, texts, strict=True)
    )
    timeline.issued = Log(Issued, issued)
    arrived = (RequestArrived(index, 0.0, length) for index, length in ((1, 10), (2, 10), (1 + NEXT_CHOICE, 12)))
    timeline.arrived = Log(RequestArrived, arrived)
    assert Spans.of(timeline).sampled.tolist() == [0, 2, 2, 0]


def test_the_error_is_that_of_each_stage() -> None:
    true, loads = model(1), some_loads(20, 17)
    spans = spans_of(true, loads)
    spans.seconds[1][:] *= 1.25
    fit = assess(true, spans)
    assert fit.stage_errors == pytest.approx((0.0, 0.2, 0.0)) and fit.error == pytest.approx(0.2 / 3)


def test_transfers_of_which_some_are_far_off_or_take_no_time() -> None:
    x = np.arange(1, 101, dtype=float)
    y = 3e-4 + 2e-9 * x
    y[::9] += 0.02
    apart = np.full(len(x), np.inf)
    link = _fit_edge(_Transfers(x, y, apart))
    assert link.latency_s == pytest.approx(3e-4, rel=0.02) and link.bytes_per_s == pytest.approx(5e8, rel=0.3)
    for none in (-y, 0 * y):
        link = _fit_edge(_Transfers(x, none, apart))
        assert link.latency_s == 0.0 and link.bytes_per_s == pytest.approx(1e15)


def test_a_long_run_is_thinned_out_before_it_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counting(design: Any, target: Any) -> Any:
        rows.append(len(design))
        return nnls(design, target)

    monkeypatch.setattr("sarathi_pp.tuning.fit.nnls", counting)
    true, loads = model(1), some_loads(500, 18) * 40
    found = fit_spans(spans_of(true, loads))
    assert max(rows) <= 4096
    for load in some_loads(20, 19):
        assert found.seconds(0, load) == pytest.approx(true.seconds(0, load), rel=1e-3)


def test_with_noise_the_modelled_times_still_add_up() -> None:
    """Least squares on relative errors alone is a tenth too low here: twice the variance."""
    spans = spans_of(model(1), some_loads(400, 12))
    noise = np.random.default_rng(13)
    noisy = replace(spans, seconds=[s * noise.normal(1, 0.25, len(s)).clip(0.4) for s in spans.seconds])
    found = fit_spans(noisy)
    for stage, seconds in enumerate(noisy.seconds):
        assert sum(found.seconds(stage, load) for load in noisy.loads) == pytest.approx(seconds.sum(), rel=0.01)
