"""Simulated pipelines that share requests: one small known schedule, and properties of every schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.load_balancer import most_held
from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.sim.arrivals import Inbox
from sarathi_pp.sim.experiment import Experiment, report_of, run, simulate, simulate_replicas
from sarathi_pp.sim.pipeline import Link, VirtualPipeline
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.replicas import run_replicas
from sarathi_pp.sim.simulation import Record, Simulation
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.events import Event, Issued, RequestArrived, RequestFinished

LIMITS = Limits(1, 8, 1, 64, 16, 100, 1)


def cost(num_stages: int = 1, seconds: float = 1.0) -> CostModel:
    return CostModel(1, tuple(StageCost((i, i + 1), seconds, 0, 0, 0, 0) for i in range(num_stages)))


def experiment(spec: str, **options: object) -> Experiment:
    profile = Profile("m", "d", "float32", 1, 3, cost(3), 0.0, 1e30, 0.0, pages=1000, max_num_seqs=6)
    defaults = {"profile": profile, "policy": parse_policy("sarathi"), "chunk_size": 16, "replicas": 2}
    return Experiment(workload=parse_workload(spec), **defaults | options)  # type: ignore[arg-type]


def request(index: int, prompt: int, output: int = 1, arrival_s: float = 0.0) -> Request:
    return Request(index, (0,) * prompt, SamplingParams(max_new_tokens=output, ignore_eos=True, seed=0), arrival_s)


def share(requests: list[Request], seconds: list[float], most: int) -> list[list[Event]]:
    """Return each replica's report of one stage, a microbatch of which takes this time in seconds."""
    told: list[list[Event]] = [[] for _ in seconds]

    def make(replica: int, record: Record) -> Simulation:
        pipeline = VirtualPipeline(cost(seconds=seconds[replica]), (Link(),))
        return Simulation(LIMITS, make_policy("sarathi"), pipeline, record)

    run_replicas(make, [lambda stage, event, to=one: to.append(event) for one in told], most, 10**9, requests)
    return told


def issues(told: list[Event]) -> list[tuple[float, str]]:
    return [(event.at_s, event.text) for event in told if isinstance(event, Issued)]


def test_a_schedule_by_hand() -> None:
    """Prompts of 5, 1, 3, 1 and 2 tokens.

    Two replicas take 1 s per microbatch, with one request running and one waiting on each.

    At 0, s0 goes to replica 0 (5 | 0) and s1 to 1 (5 | 1). Then s2 goes to 1 (5 | 4), which is full, and s3 to 0. s4
    waits for room. At 1 both have ended one. Replica 0 looks first and holds s3: 1 token and an equally long output,
    against 4 and two outputs.
    """
    requests = [request(index, prompt) for index, prompt in enumerate([5, 1, 3, 1, 2])]
    first, second = share(requests, [1.0, 1.0], most=2)
    assert issues(first) == [(0.0, "m0[s0:0+5]"), (1.0, "m1[s3:0+1]"), (2.0, "m2[s4:0+2]")]
    assert issues(second) == [(0.0, "m0[s1:0+1]"), (1.0, "m1[s2:0+3]")]


def test_an_arrival_goes_at_once_to_the_one_that_has_nothing_to_do() -> None:
    requests = [request(0, 4, output=4), request(1, 2, arrival_s=0.25), request(2, 2, arrival_s=1.5)]
    first, second = share(requests, [1.0, 1.0], most=2)
    assert issues(first) == [(0.0, "m0[s0:0+4]"), *((float(k), f"m{k}[d s0:{3 + k}]") for k in (1, 2, 3))]
    assert issues(second) == [(0.25, "m0[s1:0+2]"), (1.5, "m1[s2:0+2]")]


def test_replicas_of_different_speed_end_about_together() -> None:
    requests = [request(index, 3, output=5) for index in range(60)]
    told = share(requests, [1.0, 3.0], most=most_held(1))
    ended = [[event.finished_s for event in one if isinstance(event, RequestFinished)] for one in told]
    assert sum(map(len, ended)) == 60 and len(ended[0]) == pytest.approx(45, abs=1)
    assert abs(ended[0][-1] - ended[1][-1]) <= 2 * 3 * 5


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    """Eight groups of four prompts, shuffled. Their shared pages are computed once, not once in each replica."""
    draw = random.Random(1)
    groups = [[draw.randrange(1, 99) for _ in range(96)] for _ in range(8)] * 4
    draw.shuffle(groups)
    requests = [
        Request(index, [*group, *(draw.randrange(1, 99) for _ in range(16))], SamplingParams(max_new_tokens=2, seed=0))
        for index, group in enumerate(groups)
    ]

    limits = Limits(1, 128, 4, 200, 16, 500, 1, prefix_cache="all")

    def cached(routes: PrefixRoutes | None) -> int:
        made: list[Simulation] = []

        def make(replica: int, record: Record) -> Simulation:
            pipeline = VirtualPipeline(cost(), (Link(),))
            made.append(Simulation(limits, make_policy("sarathi"), pipeline, record))
            return made[-1]

        run_replicas(make, [lambda stage, event: None] * 2, most_held(4), 10**9, requests, routes)
        assert sum(each._coordinator.prefixes.prompt_tokens for each in made) == 32 * 112
        return sum(each._coordinator.prefixes.cached_tokens for each in made)

    whole = 24 * 96  # all but the first prompt of each group
    assert cached(None) < 0.8 * whole < cached(PrefixRoutes(limits)) <= whole


def test_a_request_is_there_from_when_it_was_given() -> None:
    box = Inbox()
    assert box.next_s == inf and box.take(inf) is None
    box.put(2.0, request(0, 1))
    assert box.next_s == 2.0 and box.take(1.9) is None and box.take(2.0) is not None and box.next_s == inf


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.floats(0, 9)), min_size=1, max_size=25),
    st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_every_request_is_answered_once_and_no_replica_holds_too_many(
    asked: list[tuple[int, int, float]], seconds: list[float], most: int
) -> None:
    asked.sort(key=lambda one: one[2])
    told = share([request(index, *one) for index, one in enumerate(asked)], seconds, most)
    ended = sorted(
        (event.index, event.prompt_tokens, event.output_tokens)
        for one in told
        for event in one
        if isinstance(event, RequestFinished)
    )
    assert ended == [(index, prompt, output) for index, (prompt, output, _) in enumerate(asked)]
    for one in told:
        times = [event.at_s for event in one if isinstance(event, Issued)]
        assert times == sorted(times)
        held = 0
        for event in one:
            held += isinstance(event, RequestArrived) - isinstance(event, RequestFinished)
            assert held <= most
            if isinstance(event, RequestFinished):
                assert event.first_issue_s is not None and event.first_issue_s >= event.arrived_s


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_went_in_comes_out_under_every_policy(policy: str) -> None:
    run_ = experiment("poisson:rate=0.5,uniform:n=24,min=3,max=60,pd=4", policy=parse_policy(policy), jitter_cv=0.05)
    timelines = simulate_replicas(run_)
    done = sorted((f.index, f.prompt_tokens, f.output_tokens) for one in timelines for f in one.finished)
    assert done == [(i, prompt, output) for i, (prompt, output) in enumerate(run_.workload.lengths())]
    report = report_of(run_)
    assert report["completed"] == 24 and report["replicas"] == 2
    assert report["prompt_tokens"] + report["output_tokens"] == sum(map(sum, run_.workload.lengths()))
    assert report["wall_s"] == pytest.approx(
        max(one.window[1] for one in timelines) - min(one.window[0] for one in timelines)
    )


def test_equal_replicas_take_as_long_for_as_many_times_the_work() -> None:
    def wall_s(replicas: int) -> float:
        spec = f"fixed:n={60 * replicas},prompt=200,output=21"
        found: float = report_of(experiment(spec, replicas=replicas, chunk_size=64))["wall_s"]
        return found

    alone_s = wall_s(1)
    assert [wall_s(replicas) for replicas in (2, 3)] == pytest.approx([alone_s] * 2, rel=0.03)


def test_noise_is_each_replica_s_own_and_the_same_every_time() -> None:
    def ends(seed: int = 0) -> list[list[float]]:
        run_ = experiment("fixed:n=12,prompt=16,output=1", jitter_cv=0.1, seed=seed)
        return [list(timeline.stages[0].ends) for timeline in simulate_replicas(run_)]

    first, second = ends()
    assert first != second and [first, second] == ends() != ends(seed=1)
    alone = experiment("fixed:n=12,prompt=16,output=1", jitter_cv=0.1, replicas=1)
    assert list(simulate(alone).stages[0].ends)[: len(first)] == pytest.approx(first)


def test_a_replica_that_gets_nothing_is_idle_and_counts() -> None:
    alone, three = (report_of(experiment("fixed:n=1,prompt=8,output=3", replicas=count)) for count in (1, 3))
    assert three["wall_s"] == alone["wall_s"] == 9.0
    assert three["bubble_ratio"] == pytest.approx(1 - (1 - alone["bubble_ratio"]) / 3)
    assert [one["requests"] for one in three["per_replica"]] == [1, 0, 0]
    assert {*alone} <= {*three}


def test_events_are_told_as_they_happen_and_none_is_kept() -> None:
    run_ = replace(experiment("fixed:n=20,prompt=30,output=4"), profile=preset("gpt3-a100-tp8pp8"))
    timelines = simulate_replicas(run_)
    told: list[list[Event]] = [[], []]
    run(run_, *(lambda stage, event, to=one: to.append(event) for one in told))

    def issued(timeline: Timeline) -> list[tuple[float, str]]:
        return [(event.at_s, event.text) for event in timeline.issued]

    assert [issues(one) for one in told] == list(map(issued, timelines))
