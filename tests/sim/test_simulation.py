"""The virtual pipeline against manual arithmetic, and the coordinator on it."""

from collections import deque
from dataclasses import replace

import pytest

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.causes import explain
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import EdgeLink, Profile
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.sim.experiment import Experiment, report_of, run, simulate
from sarathi_pp.sim.pipeline import Link, VirtualPipeline, links_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.events import Issued, RequestArrived, RequestFinished

BALANCED, SARATHI = parse_policy("balanced"), parse_policy("sarathi")


def flat(num_stages, seconds=1.0):
    """Return a cost model in which every microbatch takes the same time on every stage."""
    return CostModel(1, tuple(StageCost((i, i + 1), seconds, 0, 0, 0, 0) for i in range(num_stages)))


def profile(cost, device="d", **values):
    facts = dict(model="m", device=device, dtype="float32", hidden_size=1, num_layers=len(cost.stages))
    rest = dict(link_latency_s=0.0, link_bytes_per_s=1.0e30, jitter_cv=0.0, pages=1000, max_num_seqs=40)
    return Profile(**facts, cost=cost, **rest | values)


def test_the_spans_of_two_microbatches_on_unequal_stages():
    cost = CostModel(1, (StageCost((0, 1), 1, 0, 0, 0, 0), StageCost((1, 2), 3, 0, 0, 0, 0)))
    pipeline = VirtualPipeline(cost, (Link(latency_s=0.5, bytes_per_s=8.0, token_bytes=4),) * 2)
    batches = [MicroBatch(i, (Chunk(i, 0, 0, 1),)) for i in range(2)]  # 1 token: 0.5 + 4 / 8 s on the link
    (first, second), back = pipeline.run(batches[0])
    assert (first.start_s, first.end_s) == (0, 1)
    assert (second.arrived_s, second.start_s, second.end_s) == (2, 2, 5)
    assert back == 5.5
    (first, second), back = pipeline.run(batches[1])
    assert (first.start_s, first.end_s) == (1, 2)
    assert (second.arrived_s, second.start_s, second.end_s) == (3, 5, 8)
    assert back == 8.5


def test_the_host_takes_its_time_before_every_span():
    """Stages of 1 s, half a second of host time before each span, and no time for transfers."""
    pipeline = VirtualPipeline(flat(2), (Link(),) * 2, host_s=0.5)
    runs = [pipeline.run(MicroBatch(i, (Chunk(i, 0, 0, 1),))) for i in range(2)]
    assert [[(span.arrived_s, span.start_s, span.end_s) for span in spans] for spans, _ in runs] == [
        [(0, 0.5, 1.5), (1.5, 2, 3)],
        [(0, 2, 3), (3, 3.5, 4.5)],
    ]


def test_a_link_carries_one_microbatch_after_the_other():
    """Stages of 1 s with a link that a microbatch occupies for 3 s: they arrive 3 s apart, half a second later."""
    pipeline = VirtualPipeline(flat(2), (Link(latency_s=0.5, bytes_per_s=8.0, token_bytes=24),) * 2)
    arrived = [pipeline.run(MicroBatch(i, (Chunk(i, 0, 0, 1),)))[0][1].arrived_s for i in range(3)]
    assert arrived == [4.5, 7.5, 10.5]


def test_each_edge_has_its_own_link():
    """Stages of 1 s. Half a second to stage 1, 3 s per token to stage 2, two seconds back."""
    links = (Link(latency_s=0.5), Link(bytes_per_s=8.0, token_bytes=24), Link(latency_s=2.0))
    pipeline = VirtualPipeline(flat(3), links)
    runs = [pipeline.run(MicroBatch(i, (Chunk(i, 0, 0, 1),))) for i in range(2)]
    assert [[span.arrived_s for span in spans[1:]] for spans, _ in runs] == [[1.5, 5.5], [2.5, 8.5]]
    assert [back for _, back in runs] == [8.5, 11.5]


def test_links_are_those_of_the_profiles_stages_and_others_have_the_one_link():
    links = (EdgeLink(1.0, 4.0), EdgeLink(2.0, 8.0, added_latency_s=0.5))
    own = profile(flat(2), links=links, link_latency_s=7.0, link_bytes_per_s=2.0)
    assert links_of(own, 2) == (Link(1.0, 4.0, 4), Link(2.5, 8.0, 4))
    assert links_of(own, 3) == (Link(7.0, 2.0, 4),) * 3


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_m_equal_microbatches_have_the_textbook_bubble(num_stages):
    """m single-token requests, one per microbatch: (P - 1) / (m + P - 1)."""
    workload = parse_workload("fixed:n=10,prompt=1,output=1")
    timeline = simulate(Experiment(profile=profile(flat(num_stages)), workload=workload, policy=SARATHI, chunk_size=1))
    bubbles = measure_bubbles(timeline)
    assert bubbles.bubble_ratio == pytest.approx((num_stages - 1) / (10 + num_stages - 1))


def test_a_decode_waits_for_its_token_to_come_back():
    """One request alone: each token takes P stages and the way back, without overlap."""
    workload = parse_workload("fixed:n=1,prompt=4,output=3")
    experiment = Experiment(profile=profile(flat(4)), workload=workload, policy=SARATHI, chunk_size=8)
    finished = simulate(experiment).finished[0]
    assert (finished.first_token_s, finished.finished_s) == (4.0, 12.0)
    assert list(finished.gaps_us) == [4_000_000, 4_000_000]


def test_results_are_seen_when_the_first_stage_is_free_as_in_a_real_run():
    """Stage 0 is busy with m1 until 2 s. The result of m0 arrives at 1.1 s and is taken in at 2 s."""
    cost = CostModel(1, (StageCost((0, 1), 1, 0, 0, 0, 0), StageCost((1, 2), 0.1, 0, 0, 0, 0)))
    workload = parse_workload("fixed:n=2,prompt=1,output=2")
    timeline = simulate(Experiment(profile=profile(cost), workload=workload, policy=SARATHI, chunk_size=1))
    assert [(event.at_s, event.text) for event in timeline.issued] == [
        (0.0, "m0[s0:0+1]"),
        (1.0, "m1[s1:0+1]"),
        (2.0, "m2[d s0:1]"),
        (3.0, "m3[d s1:1]"),
    ]


def test_an_idle_pipeline_waits_for_the_next_arrival():
    requests = [Request(i, (0,), SamplingParams(max_new_tokens=1, seed=0), arrival_s=10.0 * i) for i in range(3)]
    events = []
    limits = Limits(2, 8, 4, 8, 16, 10, 2)
    pipeline = VirtualPipeline(flat(2), (Link(),) * 2)
    Simulation(limits, make_policy("sarathi"), pipeline, lambda stage, event: events.append(event)).run(requests)
    assert [event.at_s for event in events if isinstance(event, Issued)] == [0.0, 10.0, 20.0]
    assert [event.at_s for event in events if isinstance(event, RequestArrived)] == [0.0, 10.0, 20.0]
    assert [event.finished_s for event in events if isinstance(event, RequestFinished)] == [2.0, 12.0, 22.0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def spans(seed):
        workload = parse_workload("uniform:n=8,min=4,max=30,pd=3")
        experiment = Experiment(
            profile=profile(flat(3)), workload=workload, policy=BALANCED, chunk_size=16, jitter_cv=0.1, seed=seed
        )
        return list(simulate(experiment).stages[2].ends)

    assert spans(1) == spans(1) != spans(2)


def test_a_slow_stage_is_slow_and_policies_are_not_told():
    workload = parse_workload("fixed:n=4,prompt=1,output=1")
    experiment = Experiment(profile=profile(flat(2)), workload=workload, policy=SARATHI, chunk_size=1, slow={1: 1.5})
    timeline = simulate(experiment)
    lengths = [e - b for stage in timeline.stages for b, e in zip(stage.starts, stage.ends, strict=True)]
    assert lengths == [1.0] * 4 + [1.5] * 4
    assert experiment.cost().stages[1].a0 == 1.0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_answers_every_request_at_its_length(policy):
    workload = parse_workload("poisson:rate=0.3,uniform:n=12,min=3,max=60,pd=4")
    timeline = simulate(
        Experiment(profile=profile(flat(3)), workload=workload, policy=parse_policy(policy), chunk_size=16)
    )
    done = sorted((f.index, f.prompt_tokens, f.output_tokens) for f in timeline.finished)
    assert done == [(i, prompt, output) for i, (prompt, output) in enumerate(workload.lengths())]


def test_nothing_is_kept_of_what_is_done():
    """Only microbatches in flight are held, for any number of requests: the simulation keeps no list of the past."""
    seen = deque(maxlen=1)
    held = []

    class Watched(VirtualPipeline):
        def run(self, microbatch):
            held.append((len(simulation._live), len(simulation._results)))
            return super().run(microbatch)

    workload = parse_workload("fixed:n=300,prompt=3,output=2")
    limits = Limits(2, 8, 4, 8, 16, 10, 2)
    simulation = Simulation(
        limits, make_policy("sarathi"), Watched(flat(2), (Link(),) * 2), lambda stage, event: seen.append(event)
    )
    simulation.run(workload.requests(token_ids=False))
    assert max(live for live, _ in held) <= 2 * limits.max_num_seqs
    assert max(results for _, results in held) <= limits.inflight


def test_more_stages_leave_the_head_to_the_last():
    """This is how `plan` splits the same profile."""
    costs = CostModel(1, (StageCost((0, 4), 4.0, 0, 0, 0, 0), StageCost((4, 8), 4.0 + 8.0, 0, 0, 0, 0, head_s=0.5)))
    experiment = Experiment(
        profile=replace(profile(costs), num_layers=8),
        workload=parse_workload("fixed:n=1,prompt=4,output=1"),
        policy=SARATHI,
        chunk_size=8,
        stages=4,
    )
    assert [stage.a0 for stage in experiment.cost().stages] == [2.0, 2.0, 2.0, 2.0 + 8.0]
    assert experiment.cost() == repartition(costs, [(0, 2), (2, 4), (4, 6), (6, 8)])


def test_the_report_of_an_experiment_is_that_of_its_timeline():
    experiment = Experiment(
        profile=profile(flat(2)), workload=parse_workload("fixed:n=6,prompt=4,output=1"), policy=SARATHI, chunk_size=4
    )
    report = report_of(experiment)
    assert (report["stages"], report["requests"], report["microbatches"]) == (2, 6, 6)
    assert report["bubble_ratio"] == measure_bubbles(simulate(experiment)).bubble_ratio == pytest.approx(1 / 7)


def test_a_slow_stage_that_is_not_there_is_refused():
    workload = parse_workload("fixed:n=1,prompt=1,output=1")
    run = Experiment(profile=profile(flat(2)), workload=workload, policy=SARATHI, chunk_size=1, slow={2: 1.5})
    with pytest.raises(ConfigError, match="slow stage 2: there are stages 0 to 1"):
        simulate(run)


def test_pages_are_of_the_profile_s_size():
    workload = parse_workload("fixed:n=4,prompt=100,output=4")
    few = profile(flat(1), pages=3)
    with pytest.raises(ConfigError, match="holds 48"):
        simulate(Experiment(profile=few, workload=workload, policy=SARATHI, chunk_size=64))
    simulate(Experiment(profile=replace(few, page_size=64), workload=workload, policy=SARATHI, chunk_size=64))


def test_a_workload_that_never_fits_is_refused():
    experiment = Experiment(
        profile=profile(flat(2), pages=2),
        workload=parse_workload("fixed:n=1,prompt=40,output=1"),
        policy=SARATHI,
        chunk_size=8,
    )
    with pytest.raises(ConfigError, match="up to 41 tokens; the KV pool of m holds 32"):
        run(experiment, lambda stage, event: None)


def test_balanced_leaves_little_bubble_where_sarathi_of_the_wrong_size_leaves_much():
    def steady(policy, chunk_size):
        workload = parse_workload("zipf:n=60,min=256,max=512,theta=0.4,pd=5,seed=2")
        limits = dict(chunk_size=chunk_size, max_num_seqs=40, stages=4)
        experiment = Experiment(
            profile=preset("gpt3-a100-tp8pp8"), workload=workload, policy=parse_policy(policy), **limits
        )
        return measure_bubbles(simulate(experiment)).bubble_ratio_steady

    assert steady("balanced", 2048) < 0.03
    assert steady("sarathi", 512) > 0.1


def with_head(head_s):
    """Make two stages that are equal without the head, for decodes alone."""
    first, last = flat(2).stages
    return CostModel(1, (first, replace(last, head_s=head_s)))


def test_a_head_takes_the_first_stage_s_time_between_two_microbatches():
    pipeline = VirtualPipeline(with_head(0.25), (Link(),) * 2)
    batches = [MicroBatch(i, (Chunk(i, 0, 8, 1, decode=True),), head_on_first=i == 0) for i in range(2)]
    (_, last), back = pipeline.run(batches[0])
    assert (last.start_s, last.end_s, back) == (1, 2, 2), "without its head"
    (_, last), back = pipeline.run(batches[1])
    assert (last.start_s, last.end_s, back) == (2, 3.25, 3.25)
    assert pipeline.entry_free_s == 2
    assert pipeline.run_head(batches[0], 2.0) == (2.0, 2.25) and pipeline.entry_free_s == 2.25
    assert pipeline.run_head(batches[0], 1.0) == (2.25, 2.5), "once the stage is free"


def test_equal_stages_with_a_head_that_moves_are_as_good_as_equal():
    """One prompt token each, then decodes: two cohorts of four alternate on two stages of one second each."""
    runs = [
        simulate(
            Experiment(
                profile=profile(with_head(0.125), device=device),
                workload=parse_workload("fixed:n=8,prompt=1,output=101"),
                policy=SARATHI,
                chunk_size=4,
                max_num_seqs=8,
            )
        )
        for device in ("d", "cpu")
    ]
    kept, moved = (measure_bubbles(run) for run in runs)
    assert [len(run.stages[0].heads.microbatches) for run in runs] == [0, pytest.approx(100, abs=2)]
    assert kept.wall_s == pytest.approx(200 * 1.5, rel=0.02), "the last stage takes a second and a half, of four rows"
    assert moved.wall_s == pytest.approx(200 * 1.25, rel=0.02)
    assert moved.bubble_ratio_steady < 0.02 < 0.15 < kept.bubble_ratio_steady


def test_results_are_heeded_in_their_order_though_a_head_waits():
    run = Experiment(
        profile=profile(with_head(0.5), device="cpu"),
        workload=parse_workload("uniform:n=9,min=3,max=60,output=6"),
        policy=BALANCED,
        chunk_size=64,
    )
    timeline = simulate(run)
    timeline.check_order()
    returned = timeline.returned.column("at_s")
    assert list(returned) == sorted(returned)
    measured = measure_bubbles(timeline)
    assert len(timeline.stages[0].heads.microbatches) > 3
    assert all(stage.closing_error < 1e-9 for stage in measured.stages)
    causes = explain(timeline, run.cost())
    assert causes.unexplained_s == pytest.approx(0, abs=1e-6)


def test_a_head_takes_the_time_of_the_stage_that_computes_it():
    workload = parse_workload("fixed:n=4,prompt=1,output=9")
    for slow, seconds in (({1: 3.0}, 0.5), ({0: 3.0}, 1.5)):
        run = Experiment(
            profile=profile(with_head(0.5), device="cpu"), workload=workload, policy=SARATHI, chunk_size=1, slow=slow
        )
        heads = simulate(run).stages[0].heads.seconds()
        assert {round(head_s, 9) for head_s in heads.values() if head_s} == {seconds}, "but of prompts alone"


def test_heads_stay_where_they_are_where_that_was_asked_for():
    asked = dict(profile=profile(with_head(0.5), device="cpu"), policy=SARATHI, chunk_size=4)
    workload = parse_workload("fixed:n=4,prompt=1,output=9")
    auto, last = (simulate(Experiment(workload=workload, head=head, **asked)) for head in ("auto", "last"))
    assert auto.stages[0].heads.microbatches and not last.stages[0].heads.microbatches
