from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_pp.core.cut import recut
from sarathi_pp.core.policy import auto_chunk_size
from sarathi_pp.sim import rerun as module
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.pipeline import Link
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.rerun import Change, Rerun
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.timeline import Timeline

BATCH = "uniform:n=24,min=64,max=256,pd=8,seed=3"
PROFILE = preset("gpt3-a100-tp8pp8")


def experiment(spec: str = BATCH, policy: str = "sarathi", **options: int) -> Experiment:
    return Experiment(
        profile=PROFILE,
        workload=parse_workload(spec),
        policy=policy,
        chunk_size=auto_chunk_size(policy),
        **{"stages": 4, "max_num_seqs": 12, **options},  # type: ignore[arg-type]
    )


def recorded(run: Experiment) -> Rerun:
    rerun = rerun_of(simulate(run), run)
    assert rerun is not None
    return rerun


def rerun_of(timeline: Timeline, run: Experiment) -> Rerun | None:
    return Rerun.of(
        timeline,
        run.cost(),
        Link.of(run.profile),
        max_num_seqs=run.max_num_seqs,
        max_model_len=run.workload.max_tokens,
    )


def seconds(run: Experiment) -> float:
    begin, end = simulate(run).window
    return end - begin


@pytest.mark.parametrize("spec", [BATCH, f"poisson:rate=4,{BATCH}", f"poisson:rate=40,{BATCH}"])
@pytest.mark.parametrize("policy", ["balanced", "sarathi", "orca", "tgi"])
def test_a_recorded_run_takes_as_long_again(spec: str, policy: str) -> None:
    run = experiment(spec, policy)
    assert recorded(run).wall_s(Change()) == pytest.approx(seconds(run), rel=1e-9)


CHANGES = {
    "chunk size": (Change(chunk_size=64), {"chunk_size": 64}),
    "seats": (Change(max_num_seqs=6), {"max_num_seqs": 6}),
    "in flight": (Change(inflight=2), {"inflight": 2}),
    "pages": (Change(num_pages=40), {"profile": replace(PROFILE, pages=40)}),
    "policy": (Change(policy="balanced"), {"policy": "balanced", "chunk_size": auto_chunk_size("balanced")}),
    "twice": (Change(times=2), {"workload": parse_workload(f"then:{BATCH}+{BATCH}")}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_takes_as_long_as_a_run_with_it(name: str) -> None:
    change, settings = CHANGES[name]
    run = experiment()
    with_it = replace(run, **settings)  # type: ignore[arg-type]
    rerun = recorded(run)
    assert rerun.wall_s(change) == pytest.approx(seconds(with_it), rel=1e-9)
    assert rerun.wall_s(change) != pytest.approx(rerun.wall_s(Change()), rel=1e-3)
    assert rerun.saved(change) == pytest.approx(1 - seconds(with_it) / seconds(run) / change.times)


def test_another_policy_has_the_chunk_size_that_it_has_by_itself() -> None:
    small = replace(experiment(), chunk_size=32)
    expected = seconds(experiment(policy="sarathi-serve"))
    assert recorded(small).wall_s(Change(policy="sarathi-serve")) == pytest.approx(expected, rel=1e-9)


def test_arrivals_come_as_they_came_though_some_had_to_wait() -> None:
    run = experiment(f"poisson:rate=20,{BATCH}")
    arrivals = [request.arrival_s for request in run.workload.requests(token_ids=False)]
    rerun = recorded(run)
    assert [asked.arrival_s for asked in rerun.requests] == pytest.approx([one - arrivals[0] for one in arrivals])
    assert max(request.first_issue_s - request.arrived_s for request in simulate(run).finished) > 0.1  # type: ignore[operator]
    assert rerun.wall_s(Change(times=2)) > 1.5 * rerun.wall_s(Change())


def test_other_layers_and_other_numbers_of_stages() -> None:
    run = experiment()
    rerun = recorded(run)
    layers = [stage.layers[1] - stage.layers[0] for stage in run.cost().stages]
    uneven = Change(layers=(layers[0] + 2, layers[1] - 2, *layers[2:]))
    assert rerun.saved(uneven) < -0.02
    two = Change(layers=(layers[0] + layers[1], layers[2] + layers[3]))
    cut = recut(run.cost(), ((0, sum(layers[:2])), (sum(layers[:2]), sum(layers))))
    on_two = replace(run, profile=replace(PROFILE, cost=cut), stages=None, inflight=2)
    assert rerun.wall_s(two) == pytest.approx(seconds(on_two), rel=1e-9)


def test_rows_that_a_full_queue_kept_in_the_file_were_there_all_the_time() -> None:
    """Who reads a file reads a row when there is room: with as many waiting as there are seats."""
    run = experiment(max_num_seqs=4)
    timeline = simulate(run)
    issued_s = {request.index: request.first_issue_s for request in timeline.finished}
    timeline.finished = [
        replace(request, arrived_s=issued_s[request.index - 4 - 2] or 0.0) if request.index >= 4 + 2 else request
        for request in timeline.finished
    ]
    rerun = rerun_of(timeline, run)
    assert rerun is not None and {asked.arrival_s for asked in rerun.requests} == {0.0}


def test_a_run_that_is_not_over_tells_too_little() -> None:
    run = experiment()
    unfinished, killed, failed = (simulate(run) for _ in range(3))
    assert rerun_of(unfinished, run) is not None
    unfinished.finished.pop()
    killed.stages[2].end = None
    failed.finished = [replace(request, finish_reason="error") for request in failed.finished]
    assert [rerun_of(timeline, run) for timeline in (unfinished, killed, failed)] == [None] * 3


def test_of_a_long_run_the_first_requests_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment()
    whole = recorded(run)
    spans = len(simulate(run).issued) * 4
    monkeypatch.setattr(module, "_MOST_SPANS", spans // 3)
    part = recorded(run)
    assert (len(whole.requests), len(part.requests)) == (24, 8)
    assert part.requests == whole.requests[:8]


def test_each_change_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = recorded(experiment())
    assert rerun.saved(Change()) == 0.0
    first = rerun.saved(Change(inflight=2))
    monkeypatch.setattr(module, "Simulation", None)
    assert rerun.saved(Change(inflight=2)) == first
