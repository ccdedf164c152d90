from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.core.cost.model import CostModel, LayerCost, StageCost
from sarathi_pp.core.cost.profile import EdgeLink
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.policy import Limits, parse_policy
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.sim import rerun as module
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.pipeline import Link, VirtualPipeline, links_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.rerun import CannotTry, Change, Rerun
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.events import Event, Issued, TraceEnd

BATCH = "uniform:n=24,min=64,max=256,pd=8,seed=3"
PROFILE = preset("gpt3-a100-tp8pp8")


def experiment(spec: str = BATCH, policy: str = "sarathi", **options: int) -> Experiment:
    return Experiment(
        profile=PROFILE,
        workload=parse_workload(spec),
        policy=parse_policy(policy),
        chunk_size=parse_policy(policy).kind.default_chunk_size,
        **{"stages": 4, "max_num_seqs": 12, **options},  # type: ignore[arg-type]
    )


def recorded(run: Experiment) -> Rerun:
    rerun = rerun_of(simulate(run), run)
    assert rerun is not None
    return rerun


def rerun_of(timeline: Timeline, run: Experiment, max_pages: int | None = None, **options: Any) -> Rerun | None:
    return Rerun.of(
        timeline,
        run.cost(),
        links_of(run.profile, len(run.cost().stages)),
        max_num_seqs=run.max_num_seqs,
        max_model_len=run.workload.max_tokens,
        max_pages=max_pages,
        **options,
    )


def seconds(run: Experiment) -> float:
    begin, end = simulate(run).window
    return end - begin


@pytest.mark.parametrize("spec", [BATCH, f"poisson:rate=4,{BATCH}", f"poisson:rate=40,{BATCH}"])
@pytest.mark.parametrize("policy", ["balanced", "sarathi", "orca", "tgi"])
def test_a_recorded_run_takes_as_long_again(spec: str, policy: str) -> None:
    run = experiment(spec, policy)
    assert recorded(run).wall_s(Change()) == pytest.approx(seconds(run), rel=1e-9)


@pytest.mark.parametrize("policy", ["balanced", "sarathi"])
def test_so_does_one_whose_first_stage_computes_heads(policy: str) -> None:
    run = replace(experiment(policy=policy), profile=replace(PROFILE, device="cpu"))
    assert simulate(run).stages[0].heads.microbatches
    assert recorded(run).wall_s(Change()) == pytest.approx(seconds(run), rel=1e-9)
    assert seconds(run) != seconds(replace(run, profile=PROFILE))


BALANCED = parse_policy("balanced")
CHANGES = {
    "chunk size": (Change(chunk_size=64), {"chunk_size": 64}),
    "seats": (Change(max_num_seqs=6), {"max_num_seqs": 6}),
    "in flight": (Change(inflight=2), {"inflight": 2}),
    "pages": (Change(num_pages=40), {"profile": replace(PROFILE, pages=40)}),
    "policy": (Change(policy=BALANCED), {"policy": BALANCED, "chunk_size": BALANCED.kind.default_chunk_size}),
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
    assert recorded(small).wall_s(Change(policy=parse_policy("sarathi-serve"))) == pytest.approx(expected, rel=1e-9)


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
    cut = repartition(run.cost(), ((0, sum(layers[:2])), (sum(layers[:2]), sum(layers))))
    on_two = replace(run, profile=replace(PROFILE, cost=cut), stages=None, inflight=2)
    assert rerun.wall_s(two) == pytest.approx(seconds(on_two), rel=1e-9)


def test_rows_that_a_full_queue_kept_in_the_file_were_there_all_the_time() -> None:
    """A reader of a file reads a row when there is room: when fewer requests wait than there are seats."""
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


LONG = "uniform:n=100,min=64,max=256,pd=8,seed=3"


def test_of_a_long_run_the_first_requests_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment(LONG, max_num_seqs=2)
    whole = recorded(run)
    assert whole.counted == len(whole.requests) == 100
    monkeypatch.setattr(module, "_MOST_STEPS", 1000)
    part = recorded(run)
    assert 40 <= len(part.requests) < 80 and part.counted == len(part.requests) - 16
    assert part.requests == whole.requests[: len(part.requests)]


def test_prompts_without_ids_never_meet_a_cache() -> None:
    """The recorded run had one, and found nothing. The prompts of its rerun are all equal, so they would find each
    other.
    """
    run = replace(experiment(), prefix_cache="all")
    rerun = recorded(run)
    assert rerun.wall_s(Change()) == pytest.approx(seconds(replace(run, prefix_cache="off")))
    more = Change(max_num_seqs=2 * rerun.limits.max_num_seqs)
    assert rerun._with(more)[1].prefix_cache == "off"


def test_more_than_twice_what_may_run_at_once_is_tried_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shorter run, filling and draining take most of the time, and additional seats would stay empty."""
    run = experiment(LONG, max_num_seqs=10)
    monkeypatch.setattr(module, "_MOST_STEPS", 1000)
    assert len(recorded(run).requests) == 50
    monkeypatch.setattr(module, "_MOST_STEPS", 100)
    with pytest.raises(CannotTry, match="50 of its requests must be simulated, but only [0-9]+ can be"):
        rerun_of(simulate(run), run)


def test_the_first_requests_gain_what_the_whole_run_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are of unequal length. A sample that drains would gain a different amount than a longer run."""
    run = experiment("uniform:n=200,min=16,max=256,pd=3,seed=5", max_num_seqs=5)
    whole = recorded(run)
    monkeypatch.setattr(module, "_MOST_STEPS", len(simulate(run).issued))
    part = recorded(run)
    assert len(part.requests) < 80
    for change in (Change(max_num_seqs=10), Change(chunk_size=64), Change(inflight=2)):
        assert part.saved(change) == pytest.approx(whole.saved(change), abs=0.03)
    assert part.saved(Change(times=2)) == 0.0


def test_a_trial_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = recorded(experiment())
    monkeypatch.setattr(module, "_MOST_STEPS", 10)
    assert rerun.saved(Change(chunk_size=16)) == rerun.sooner(Change(chunk_size=16)) == -math.inf


def test_the_first_token_of_a_prompt_that_runs_whole_comes_sooner() -> None:
    run = experiment("fixed:n=3,prompt=2000,output=50", stages=1, max_num_seqs=1)
    rerun, whole = recorded(run), Change(policy=parse_policy("orca"))

    def first_token_s(run: Experiment) -> float:
        finished = simulate(run).finished
        return sum(r.first_token_s - r.first_issue_s for r in finished) / len(finished)  # type: ignore[operator]

    expected = 1 - first_token_s(replace(run, policy=parse_policy("orca"))) / first_token_s(run)
    assert rerun.sooner(whole) == pytest.approx(expected) and expected > 2 * rerun.saved(whole) > 0


def test_what_somebody_chose_to_have_in_flight_stays_with_another_policy() -> None:
    for inflight in (2, 4):  # sarathi's default is the number of stages
        rerun = recorded(experiment(inflight=inflight))
        kept = Change(policy=BALANCED, inflight=2 if inflight == 2 else 5)
        assert rerun.wall_s(Change(policy=BALANCED)) == rerun.wall_s(kept)


def test_pages_that_seats_can_take_grow_with_the_seats() -> None:
    """Four seats of 512 tokens each have all the pages that they can take, and eight have twice that number."""
    run = experiment("fixed:n=24,prompt=500,output=12", max_num_seqs=4)
    full = replace(run, profile=replace(PROFILE, pages=4 * 32))
    rerun = rerun_of(simulate(full), full, max_pages=8 * 32)
    assert rerun is not None
    expected = seconds(replace(full, max_num_seqs=8, profile=replace(PROFILE, pages=8 * 32)))
    assert rerun.wall_s(Change(max_num_seqs=8)) == pytest.approx(expected, rel=1e-9)
    for known in (None, 4 * 32):  # not known to be more, or known not to be
        rerun = rerun_of(simulate(full), full, max_pages=known)
        assert rerun is not None
        assert rerun.wall_s(Change(max_num_seqs=8)) == rerun.wall_s(Change(max_num_seqs=8, num_pages=4 * 32))
        assert rerun.wall_s(Change(max_num_seqs=8)) > 1.1 * expected


def test_states_of_more_sequences_leave_fewer_pages() -> None:
    run = experiment("fixed:n=24,prompt=500,output=12", max_num_seqs=4)
    full = replace(run, profile=replace(PROFILE, pages=4 * 32))
    rerun = rerun_of(simulate(full), full, max_pages=8 * 32, keeps_states=True, state_pages=24.5)
    assert rerun is not None
    found = [rerun._with(Change(max_num_seqs=seats))[1].num_pages for seats in (4, 8, 12)]
    assert found == [4 * 32, 8 * 32 - 98, 8 * 32 - 196]


def test_a_run_with_states_repeats_no_tokens_again() -> None:
    policy = "chunkllm:threshold=32,overlap=0.25"
    run = experiment(policy=policy)
    kinds = ["linear"] + ["attention"] * (PROFILE.num_layers - 1)
    layers = tuple(LayerCost(kind, 1e-3, 1e-3, 0, 0, 0, page_bytes=0) for kind in kinds)
    hybrid = replace(run, profile=replace(PROFILE, cost=replace(PROFILE.cost, layer_costs=layers)))
    rerun = rerun_of(simulate(hybrid), hybrid, keeps_states=True)
    assert rerun is not None and rerun.wall_s(Change()) == pytest.approx(seconds(hybrid), rel=1e-9)
    assert [rerun._with(Change(max_num_seqs=seats))[1].num_slots for seats in (None, 24)] == [12, 24]


def with_hosts(timeline: Timeline, host_s: float) -> Timeline:
    """Rewrite traces so that the host took the first `host_s` seconds in each modelled time."""
    for stage in timeline.stages:
        for index, start in enumerate(stage.starts):
            stage.starts[index] = start + host_s
    return timeline


def test_what_the_host_takes_for_each_microbatch_it_takes_again() -> None:
    """Microbatches of half the size are twice as frequent, and the host takes the same time for each."""
    run, host_s = experiment(), 0.02
    slow = tuple(replace(stage, a0=stage.a0 + host_s) for stage in run.cost().stages)
    slowed = replace(run, profile=replace(PROFILE, cost=replace(run.cost(), stages=slow)), stages=None)
    rerun = rerun_of(with_hosts(simulate(slowed), host_s), run)
    assert rerun is not None and rerun.host_s == pytest.approx((host_s,) * 4)
    for size in (256, 128):
        expected = seconds(replace(slowed, chunk_size=size))
        assert rerun.wall_s(Change(chunk_size=size)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("speed", [0.75, 1.3])
def test_nothing_is_said_of_a_run_that_does_not_come_out_as_long_as_it_was(speed: float) -> None:
    run = experiment()
    cost = run.cost()
    off = replace(cost, stages=tuple(stage.scaled(speed) for stage in cost.stages))
    with pytest.raises(CannotTry, match="the simulator takes .* s for .* s of the run"):
        Rerun.of(simulate(run), off, links_of(run.profile, len(run.cost().stages)))


def test_drawn_arrivals_are_kept_however_many_wait() -> None:
    """With two seats, requests come faster than they are answered.

    Each waiting request keeps its drawn arrival time.
    """
    run = experiment(f"poisson:rate=20,{BATCH}", max_num_seqs=2)
    timeline = simulate(run)
    drawn = [request.arrived_s for request in sorted(timeline.finished, key=lambda request: request.index)]
    rerun = Rerun.of(
        timeline, run.cost(), links_of(run.profile, len(run.cost().stages)), max_num_seqs=2, request_rate=20.0
    )
    assert rerun is not None
    assert [asked.arrival_s for asked in rerun.requests] == pytest.approx([at_s - drawn[0] for at_s in drawn])


def test_stages_with_more_layers_have_room_for_fewer_pages() -> None:
    """Half the number of stages, with twice the layers each, has half of the pages."""
    run = replace(experiment(), profile=replace(PROFILE, pages=60))
    rerun = recorded(run)
    layers = [stage.layers[1] - stage.layers[0] for stage in run.cost().stages]
    two = Change(layers=(layers[0] + layers[1], layers[2] + layers[3]))
    assert rerun.wall_s(two) == rerun.wall_s(replace(two, num_pages=30)) > rerun.wall_s(replace(two, num_pages=60))
    told = replace(rerun, pages_follow_layers=False, _tried={})
    assert told.wall_s(two) == rerun.wall_s(replace(two, num_pages=60))


def damaged(timeline: Timeline, **changes: int) -> Timeline:
    timeline.finished = [replace(timeline.finished[0], **changes), *timeline.finished[1:]]  # type: ignore[arg-type]
    return timeline


@pytest.mark.parametrize(
    "changes", [{"output_tokens": 10**9}, {"prompt_tokens": 10**13}, {"prompt_tokens": 0}, {"output_tokens": -1}]
)
def test_a_trace_in_which_more_was_answered_than_computed_is_not_tried(changes: dict[str, int]) -> None:
    run = experiment()
    assert rerun_of(damaged(simulate(run), **changes), run) is None


def test_a_policy_that_nobody_here_knows_is_not_tried() -> None:
    run = experiment()
    timeline = simulate(run)
    timeline.stages[0].start = replace(timeline.stages[0].start, policy="of-tomorrow")
    assert rerun_of(timeline, run) is None


def test_each_change_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = recorded(experiment())
    assert rerun.saved(Change()) == 0.0
    first = rerun.saved(Change(inflight=2))
    monkeypatch.setattr(module, "Simulation", None)
    assert rerun.saved(Change(inflight=2)) == first


def test_one_slow_edge_is_as_slow_again_and_other_stages_have_the_mean() -> None:
    fast, slow = EdgeLink(1e-5, 2e11), EdgeLink(2e-3, 1e9)
    profile = replace(PROFILE, cost=experiment().cost(), links=(fast, slow, fast, fast))
    run = replace(experiment(), profile=profile)
    with_all_slow = replace(run, profile=replace(profile, links=(slow,) * 4))
    rerun = recorded(run)
    assert rerun.wall_s(Change()) == pytest.approx(seconds(run), rel=1e-9)
    assert seconds(experiment()) < seconds(run) < seconds(with_all_slow)
    others = rerun._links(3)
    assert len(set(others)) == 1 and others[0].latency_s == pytest.approx((2 * fast.latency_s + slow.latency_s) / 3)


def shared_run(**limits: int) -> Timeline:
    """Record eight requests on two stages, one per second. They begin with the same 48 tokens, on pages of 16."""
    stages = tuple(StageCost((stage, stage + 1), 0.01, 1e-3, 1e-6, 1e-6, 1e-4) for stage in range(2))
    cost, (first, *_) = CostModel(1, stages), simulate(experiment()).stages
    timeline = Timeline()
    for stage in range(2):
        start = replace(first.start, stage=stage, num_stages=2, layers=(stage, stage + 1), inflight=2, num_pages=64)
        timeline.stages.append(StageTimeline(replace(start, prefix_cache="all", **limits)))
    start = timeline.stages[0].start
    made = Limits(2, start.chunk_size, 4, 100, 16, start.num_pages, 2, prefix_cache="all")
    pipeline = VirtualPipeline(cost, (Link(0.0, math.inf, token_bytes=1),) * 2)

    def record(stage: int, event: Event) -> None:
        timeline.add(timeline.stages[stage], event)

    tokens = [(*range(48), *range(1000 * index, 1000 * index + 20)) for index in range(1, 9)]
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=0)
    simulation = Simulation(made, parse_policy("sarathi").make(), pipeline, record)
    simulation.run(Request(index, ids, sampling, float(index)) for index, ids in enumerate(tokens))
    for stage in timeline.stages:
        stage.end = TraceEnd(at_s=stage.ends[-1])
        stage.align()
    return timeline


def rerun_of_shared(timeline: Timeline) -> Rerun | None:
    stages = tuple(StageCost((stage, stage + 1), 0.01, 1e-3, 1e-6, 1e-6, 1e-4) for stage in range(2))
    links = (Link(0.0, math.inf, token_bytes=1),) * 2
    return Rerun.of(timeline, CostModel(1, stages), links, max_num_seqs=4, max_model_len=100, request_rate=1.0)


def test_tokens_that_were_found_are_found_again() -> None:
    timeline = shared_run()
    assert [request.cached_tokens for request in timeline.finished] == [0] + [48] * 7
    begin, end = timeline.window
    rerun = rerun_of_shared(timeline)
    assert rerun is not None
    assert rerun.wall_s(Change()) == pytest.approx(end - begin, rel=1e-9)
    forgetful = replace(rerun, requests=tuple(one._replace(cached_tokens=0) for one in rerun.requests), _tried={})
    assert forgetful._times(Change()).first_token_s > 2 * rerun._times(Change()).first_token_s
    twice, once = rerun._times(Change(times=2)), rerun._times(Change())
    assert twice.wall_s == pytest.approx(2 * (end - begin), rel=0.2)
    assert twice.first_token_s == pytest.approx(once.first_token_s)


def test_tokens_that_were_found_need_no_computed_ones_in_the_trace() -> None:
    timeline = shared_run()
    damaged = [replace(request, cached_tokens=0) for request in timeline.finished]
    timeline.finished, found = damaged, timeline.finished
    assert rerun_of_shared(timeline) is None
    timeline.finished = found
    assert rerun_of_shared(timeline) is not None


def test_hits_and_preemptions_together_are_not_repeated() -> None:
    timeline = shared_run()
    timeline.finished[3] = replace(timeline.finished[3], preemptions=2)
    with pytest.raises(
        CannotTry, match="preempted requests 2 times and found 336 tokens in the prefix cache.*--prefix-cache off"
    ):
        rerun_of_shared(timeline)
    timeline.finished = [replace(request, preemptions=0) for request in timeline.finished]
    assert rerun_of_shared(timeline) is not None


def test_pages_of_their_own_for_found_tokens_come_back() -> None:
    """The second of two requests finds 48 tokens. It holds 5 pages for 68 and 6 tokens, like the first."""
    events: list[Event] = []
    stages = (StageCost((0, 1), 0.01, 1e-3, 0.0, 0.0, 0.0),)
    pipeline = VirtualPipeline(CostModel(1, stages), (Link(0.0, math.inf, token_bytes=1),))
    limits, policy = Limits(1, 512, 4, 100, 16, 10, 1), parse_policy("sarathi").make()
    simulation = Simulation(limits, policy, pipeline, lambda stage, event: events.append(event), hits=[0, 48])
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=0)
    simulation.run(Request(index, (0,) * 68, sampling) for index in range(2))
    issued = [event for event in events if isinstance(event, Issued)]
    assert issued[0].text == "m0[s0:0+68 s1:48+20]"
    assert (issued[0].pages_used, issued[0].tokens_held) == (10, 136)
    assert (issued[-1].pages_used, issued[-1].tokens_held) == (10, 2 * 73)
    pool = simulation._coordinator.pool
    assert pool.num_free == pool.num_pages and simulation._coordinator.held_tokens == 0


def test_a_policy_that_repeats_tokens_repeats_none_that_were_found() -> None:
    issued: list[Issued] = []

    def record(stage: int, event: Event) -> None:
        if isinstance(event, Issued):
            issued.append(event)

    stages = (StageCost((0, 1), 0.01, 1e-3, 0.0, 0.0, 0.0),)
    pipeline = VirtualPipeline(CostModel(1, stages), (Link(0.0, math.inf, token_bytes=1),))
    policy = parse_policy("chunkllm:threshold=20,overlap=0.3").make()
    simulation = Simulation(Limits(1, 16, 4, 100, 16, 40, 1), policy, pipeline, record, hits=[48])
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=0)
    simulation.run(Request(index, (0,) * 90, sampling) for index in range(4))
    starts = [int(start) for event in issued for start in re.findall(r":(\d+)\+", event.text)]
    assert min(starts) == starts[0] == 48
    assert sum(event.prefill_tokens for event in issued) > 4 * (90 - 48), "nothing was repeated"
