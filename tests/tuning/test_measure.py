"""A calibration of a pipeline whose cost is known: the measurements equal the simulated costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean, median

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import NO_DRIFT, Drift
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.calibration import make_timetable
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.noise import Noise
from sarathi_pp.sim.pipeline import Link, Links, VirtualPipeline
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.trace.events import Compute, Event, TraceStart
from sarathi_pp.tuning.calibrate import calibration_config
from sarathi_pp.tuning.measure import Measurement, measure
from tests.analysis.schedules import start
from tests.core.test_calibration import requests_of

LIMITS = Limits(2, 2048, 64, 4096, 16, 9000, 2)
TRUE = CostModel(
    1,
    (
        StageCost((0, 4), 20e-3, 6e-4, 4e-7, 6e-7, 1e-4),
        StageCost((4, 8), 22e-3, 6e-4, 4e-7, 6e-7, 1e-4, head_s=3e-4),
    ),
)
LINK = Link(latency_s=4e-4, bytes_per_s=2e9, token_bytes=2048)


def traces_of(
    cost: CostModel = TRUE,
    *,
    link: Link = LINK,
    links: Links | None = None,
    jitter_cv: float = 0.0,
    drift: Drift = NO_DRIFT,
    seed: int = 1,
    limits: Limits = LIMITS,
    host_s: float = 0.0,
):
    """Calibrate on a virtual clock. Return the traces of the stages, and the number of warm-up microbatches."""
    timetable = make_timetable(limits)
    traces: list[list[Event]] = [[start(stage, len(cost.stages))] for stage in range(len(cost.stages))]
    pipeline = VirtualPipeline(
        cost, links or (link,) * len(cost.stages), Noise(len(cost.stages), jitter_cv, drift, seed), host_s=host_s
    )
    simulation = Simulation(
        limits, make_policy("calibration"), pipeline, lambda stage, event: traces[stage].append(event)
    )
    simulation.run(requests_of(timetable))
    return traces, timetable.warm_up


def measured(**options) -> Measurement:
    traces, warm_up = traces_of(**options)
    return measure(traces, warm_up, LINK.token_bytes)


def test_a_known_pipeline_is_measured_exactly() -> None:
    found = measured()
    assert found.fit.error < 1e-3 and found.fit.model.tile == 1
    for stage, true in zip(found.fit.model.stages, TRUE.stages, strict=True):
        for name in ("a0", "a1", "a2", "a3", "a4", "head_s"):
            assert getattr(stage, name) == pytest.approx(getattr(true, name), rel=0.02, abs=1e-9), name
    assert (found.link.latency_s, found.link.bytes_per_s) == pytest.approx((4e-4, 2e9), rel=1e-3)
    assert found.jitter_cv < 1e-3 and found.drift.cv < 1e-3 and found.disturbed is None
    assert found.microbatches == pytest.approx(5 * found.held_out, abs=5)


def test_what_the_host_takes_is_measured_and_is_in_no_other_figure() -> None:
    found = measured(host_s=2e-3)
    assert found.host_s == pytest.approx(2e-3) and measured().host_s == pytest.approx(0.0, abs=1e-9)
    assert found.fit.error < 1e-3 and found.link.latency_s == pytest.approx(4e-4, rel=1e-3)


@pytest.mark.parametrize("jitter_cv", [0.02, 0.08])
def test_noise_is_the_jitter_and_about_the_error(jitter_cv: float) -> None:
    found = measured(jitter_cv=jitter_cv)
    assert found.jitter_cv == pytest.approx(jitter_cv, rel=0.35)
    assert found.drift.cv < 0.5 * jitter_cv, "noise that is not the same a moment later is no drift"
    for error in found.fit.stage_errors:  # the mean of |N(0, cv)| is 0.8 cv, over some 45 microbatches
        assert 0.5 * jitter_cv < error < 1.3 * jitter_cv


@pytest.mark.parametrize(("cv", "seconds"), [(0.1, 0.5), (0.1, 4.0), (0.2, 2.0)])
def test_a_speed_that_moves_is_a_drift(cv: float, seconds: float) -> None:
    """One run shows a few dozen changes of it, so the mean of several runs is checked."""
    drifts = [measured(drift=Drift(cv, seconds), seed=seed).drift for seed in range(6)]
    assert fmean(drift.cv for drift in drifts) == pytest.approx(cv, rel=0.35)
    assert seconds / 4 <= median(drift.seconds for drift in drifts) <= 4 * seconds


def test_what_all_stages_share_is_no_noise_of_a_stage() -> None:
    """A model that is wrong for a microbatch is wrong on every stage. No stage waits for another because of it."""
    traces, warm_up = traces_of(jitter_cv=0.02)
    draw = Random(5)
    factors = [draw.uniform(0.8, 1.2) for _ in traces[0]]
    off = [
        [slowed(event, factors[event.microbatch]) if isinstance(event, Compute) else event for event in trace]
        for trace in traces
    ]
    found = measure(off, warm_up, LINK.token_bytes)
    assert found.fit.error > 0.07
    assert found.jitter_cv == pytest.approx(0.02, rel=0.5) and found.drift.cv < 0.02


def test_a_machine_that_slows_down_over_the_run_has_no_jitter() -> None:
    traces, warm_up = traces_of()
    drifting = [
        [slowed(event, 1 + 0.002 * event.microbatch) if isinstance(event, Compute) else event for event in trace]
        for trace in traces
    ]
    found = measure(drifting, warm_up, LINK.token_bytes)
    assert found.jitter_cv < 0.01 and found.fit.error > 0.05


def test_the_error_is_that_of_microbatches_that_were_not_fitted() -> None:
    """Every fifth microbatch took three times as long as a model would predict.

    Only the error includes it, not the fit.
    """
    traces, warm_up = traces_of()
    held_out = [[slowed(event, 3.0) if is_held_out(event) else event for event in trace] for trace in traces]
    found = measure(held_out, warm_up, LINK.token_bytes)
    assert found.fit.stage_errors == pytest.approx((2 / 3, 2 / 3), rel=1e-3)
    assert found.fit.model.stages[0].a1 == pytest.approx(6e-4, rel=0.01)


def is_held_out(event: Event) -> bool:
    return isinstance(event, Compute) and event.microbatch % 5 == 4


def slowed(event: Event, factor: float) -> Event:
    assert isinstance(event, Compute)
    return replace(event, end_s=event.start_s + factor * (event.end_s - event.start_s))


def test_warming_up_does_not_count() -> None:
    traces, _ = traces_of()
    slow_start = [
        [slowed(event, 9.0) if isinstance(event, Compute) and event.microbatch < 10 else event for event in trace]
        for trace in traces
    ]
    assert measure(slow_start, 10, LINK.token_bytes).fit.error < 1e-3
    assert measure(slow_start, 0, LINK.token_bytes).fit.error > 1e-2


@pytest.mark.parametrize("usual", [1.0, 0.6])
def test_where_cores_are_shared_the_threads_own_time_counts(usual: float) -> None:
    """usual: the part of an undisturbed span that the thread itself computes, less than 1 if it has helpers."""
    traces, warm_up = traces_of()

    def shared(event: Event) -> Event:
        if not isinstance(event, Compute):
            return event
        length_s = event.end_s - event.start_s
        longer = 1.8 if event.microbatch % 7 < 3 else 1.0
        return replace(event, end_s=event.start_s + longer * length_s, cpu_s=usual * length_s)

    found = measure([[shared(event) for event in trace] for trace in traces], warm_up, LINK.token_bytes)
    assert found.disturbed == pytest.approx(3 / 7, abs=0.02)
    assert found.fit.error < 1e-3


def test_what_sums_over_a_stage_s_ranks_take_is_part_of_what_it_takes() -> None:
    """A quarter of each span waits in sums, in which the thread needs no core. The core does not count as shared."""
    (traces, warm_up), plain = traces_of(), measured()

    def summed(event: Event, lasts: float = 1.0) -> Event:
        if not isinstance(event, Compute):
            return event
        length_s = event.end_s - event.start_s
        own_s, sum_s = 0.75 * length_s, 0.25 * length_s
        return replace(event, end_s=event.start_s + lasts * own_s + sum_s, cpu_s=own_s, collective_s=sum_s)

    quiet = measure([[summed(event) for event in trace] for trace in traces], warm_up, LINK.token_bytes)
    assert quiet.disturbed == 0
    assert quiet.fit.model.stages[0].a0 == pytest.approx(plain.fit.model.stages[0].a0)
    shared = [
        [summed(event, 3.0 if isinstance(event, Compute) and event.microbatch % 7 == 0 else 1.0) for event in trace]
        for trace in traces
    ]
    busy = measure(shared, warm_up, LINK.token_bytes)
    assert busy.disturbed == pytest.approx(1 / 7, abs=0.02)
    assert busy.fit.model.stages[0].a0 == pytest.approx(plain.fit.model.stages[0].a0, rel=0.01)
    assert busy.fit.model.stages[0].a1 == pytest.approx(plain.fit.model.stages[0].a1, rel=0.01)


@pytest.mark.parametrize("bytes_per_s", [1e9, 8e6], ids=["fast", "slower than the stages"])
def test_each_edge_is_measured_by_itself(bytes_per_s: float) -> None:
    """At 8 MB/s a microbatch takes up the link for longer than any stage, so most messages wait for others."""
    cost = CostModel(
        1, (*TRUE.stages[:1], StageCost((4, 8), 2e-3, 1e-4, 0, 0, 0), StageCost((8, 12), 2e-3, 1e-4, 0, 0, 0))
    )
    links = (Link(2e-3, bytes_per_s, 2048), Link(1e-5, 1e10, 2048), Link(3e-3))
    found = measured(cost=cost, links=links, limits=replace(LIMITS, num_stages=3, inflight=4))
    assert [link.latency_s for link in found.links] == pytest.approx([2e-3, 1e-5, 3e-3], rel=0.02, abs=1e-6)
    assert [link.bytes_per_s for link in found.links[:2]] == pytest.approx([bytes_per_s, 1e10], rel=0.02)


def test_a_single_stage_has_no_link() -> None:
    found = measured(
        cost=CostModel(1, TRUE.stages[:1]), limits=replace(LIMITS, num_stages=1, inflight=1, max_num_seqs=32)
    )
    assert (found.link.latency_s, found.link.bytes_per_s) == (0.0, 1e15)
    assert found.links == ()
    assert found.fit.error < 1e-3


def test_measured_throughput_has_no_attention_in_it() -> None:
    rates = dict(measured().throughput)
    assert rates[2048] == pytest.approx(2048 / (22e-3 + 2048 * 6e-4), rel=1e-3)
    assert rates[1] == pytest.approx(1 / (22e-3 + 6e-4), rel=0.02)
    assert rates[64] < rates[256] < rates[1024]


def test_too_little_room_to_measure_is_said() -> None:
    tiny = Limits(1, 2048, 1, 4, 1, 4, 1)
    traces, warm_up = traces_of(CostModel(1, TRUE.stages[:1]), limits=tiny)
    with pytest.raises(ConfigError, match="microbatches were measured, too few.*\n.*--kv-cache-memory"):
        measure([trace[:40] for trace in traces], warm_up, 8)


def test_a_run_without_a_single_microbatch_is_too_little_too() -> None:
    traces, warm_up = traces_of(CostModel(1, TRUE.stages[:1]), limits=Limits(1, 2048, 1, 4, 1, 4, 1))
    with pytest.raises(ConfigError, match="0 microbatches were measured, too few"):
        measure([[event for event in trace if isinstance(event, TraceStart)] for trace in traces], warm_up, 8)


def test_the_measuring_run_is_the_users_but_for_its_schedule() -> None:
    asked = RunConfig(model="m", stages=3, dtype="float32", layer_split=(3, 3, 2), max_num_seqs=10, inflight=9, seed=4)
    config = calibration_config(asked)
    assert (config.policy, config.chunk_size, config.inflight) == ("calibration:seed=4", 2048, 3)
    alone = calibration_config(replace(asked, stages=1, layer_split=None))
    assert alone.inflight == 1, "no microbatch is issued ahead, so that each result is back when the timetable needs it"
    assert config.head == "last", "a stage with a head and one without are not the same to fit"
    assert config.prefix_cache == "off"
    assert replace(config, policy=asked.policy, chunk_size=None, inflight=9, head="auto", prefix_cache="auto") == asked
