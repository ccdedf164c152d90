from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.tuning.prediction import Demand, predict


def profile(stages: int, **coefficients: float) -> Profile:
    costs = {"a0": 2e-3, "a1": 2e-4, "a2": 0.0, "a3": 0.0, "a4": 0.0} | coefficients
    return Profile(
        model="synthetic",
        device="cpu",
        dtype="bfloat16",
        hidden_size=64,
        num_layers=stages,
        cost=CostModel(1, tuple(StageCost((s, s + 1), **costs) for s in range(stages))),
        link_latency_s=0.0,
        link_bytes_per_s=1e15,
        jitter_cv=0.0,
        pages=100_000,
        max_num_seqs=32,
    )


def run_of(stages: int, chunk_size: int = 256, **changed: object) -> ResolvedRun:
    fields: dict[str, object] = {
        "model": "synthetic",
        "policy": "sarathi",
        "layers": tuple((s, s + 1) for s in range(stages)),
        "chunk_size": chunk_size,
        "max_num_seqs": 32,
        "max_model_len": 8192,
        "max_microbatch_tokens": chunk_size,
        "page_size": 16,
        "num_pages": 100_000,
        "inflight": stages,
        "dtype": "bfloat16",
        "device": "cpu",
        "attention": "sdpa",
        "kv_cache_dtype": "float32",
        "seed": 0,
        "peer_timeout_s": 60.0,
    }
    return ResolvedRun(**fields | changed)  # type: ignore[arg-type]


def test_a_workload_as_a_prediction_asks_for_it() -> None:
    demand = Demand.of(parse_workload("poisson:rate=4,fixed:n=10,prompt=100,output=21"))
    assert (demand.num_requests, demand.prompt_tokens, demand.decodes) == (10, 1000, 200)
    assert demand.pair_tokens == 10 * 100 * 100 / 2
    assert demand.key_tokens == 10 * 20 * (100 + 10.5)
    assert demand.mean_tokens == 110
    load = demand.load(50, 4)
    assert (load.prefill_tokens, load.decodes, load.decode_context) == (50, 4, 442)
    assert load.prefill_attention == pytest.approx(50 * 50)  # the middle of a prompt


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_prompts_alone_have_the_bubble_of_fill_and_drain(stages: int) -> None:
    workload = parse_workload("fixed:n=20,prompt=256,output=1")
    found = predict(profile(stages), workload, run_of(stages))
    seconds = 2e-3 + 256 * 2e-4
    assert found.microbatches == 20
    assert found.wall_s == pytest.approx((20 + stages - 1) * seconds)
    assert found.bubble_ratio == pytest.approx((stages - 1) / (20 + stages - 1))
    assert found.total_tokens_per_s == pytest.approx(20 * 257 / found.wall_s)


def test_the_slowest_stage_sets_the_pace() -> None:
    uneven = profile(2)
    slow = replace(uneven.cost.stages[1], a0=4e-3, a1=4e-4)
    uneven = replace(uneven, cost=CostModel(1, (uneven.cost.stages[0], slow)))
    workload = parse_workload("fixed:n=100,prompt=256,output=1")
    found = predict(uneven, workload, run_of(2))
    assert found.bubble_ratio == pytest.approx(0.25, abs=0.01)  # half of one of two stages


def test_a_slow_link_is_waited_for_only_by_those_in_flight() -> None:
    workload = parse_workload("fixed:n=50,prompt=256,output=1")
    slow = replace(profile(2), link_latency_s=0.1)
    two, six = (predict(slow, workload, run_of(2, inflight=inflight)) for inflight in (2, 6))
    seconds = 2e-3 + 256 * 2e-4
    assert two.wall_s == pytest.approx(50 / 2 * (2 * seconds + 2 * 0.1), rel=0.01)  # arriving, and the result back
    assert six.wall_s == pytest.approx(50 * seconds + seconds + 0.2, rel=0.01)


def test_arrivals_can_be_what_is_waited_for() -> None:
    workload = parse_workload("poisson:rate=0.5,fixed:n=20,prompt=256,output=1")
    assert predict(profile(2), workload, run_of(2)).wall_s == pytest.approx(40, rel=0.3)


@pytest.mark.parametrize("changed", [{"max_num_seqs": 8}, {"num_pages": 16 * 8}])
def test_fewer_seats_or_pages_make_more_and_smaller_microbatches(changed: dict[str, object]) -> None:
    workload = parse_workload("fixed:n=64,prompt=208,output=96")
    wide, narrow = (predict(profile(2), workload, run_of(2, **given)) for given in ({}, changed))
    assert narrow.microbatches > 1.5 * wide.microbatches and narrow.total_tokens_per_s < wide.total_tokens_per_s


def test_a_long_workload_goes_on_as_it_begins() -> None:
    """The first of 900 requests are simulated. Their prediction is close to the time of all."""
    workload = parse_workload("uniform:n=900,min=100,max=300,pd=8")
    costs = profile(2, a2=2e-7, a3=5e-7, a4=1e-4)
    found = predict(costs, workload, run_of(2))
    timeline = simulate(Experiment(profile=costs, workload=workload, policy=parse_policy("sarathi"), chunk_size=256))
    assert found.wall_s == pytest.approx(measure_bubbles(timeline).wall_s, rel=0.03)
    assert found.microbatches == pytest.approx(len(timeline.issued), rel=0.1)


def test_the_policy_that_is_to_run_is_the_one_predicted() -> None:
    workload = parse_workload("uniform:n=100,min=100,max=900,pd=8")
    chunked, whole = (predict(profile(4), workload, run_of(4, policy=policy)) for policy in ("sarathi", "orca"))
    assert chunked.bubble_ratio < whole.bubble_ratio


def test_a_policy_that_goes_by_the_longest_request_there_may_be_is_told_the_run_s() -> None:
    """ChunkLLM cuts at a quarter of it: 900 tokens are one microbatch at a limit of 8192, and four at 904."""
    work = parse_workload("fixed:n=8,prompt=900,output=4")
    many = [predict(profile(2), work, run_of(2, policy="chunkllm", max_model_len=most)) for most in (904, 8192)]
    assert many[0].microbatches > many[1].microbatches


def test_a_cache_is_predicted_only_for_prompts_that_share_tokens() -> None:
    """Simulated prompts without ids are all equal. If they met a cache, it would find nearly every token."""
    plain, shared = "fixed:n=40,prompt=400,output=9", "fixed:n=40,prompt=400,output=9,shared=320,groups=2"
    modes = ("off", "prompts", "all")
    off, prompts, everything = (predict(profile(2), parse_workload(plain), run_of(2, prefix_cache=m)) for m in modes)
    assert off == prompts == everything
    none, found = (predict(profile(2), parse_workload(shared), run_of(2, prefix_cache=m)) for m in modes[:2])
    assert none == off
    prefill_s = 2e-4 * 40 * 400
    assert found.wall_s < none.wall_s - 0.6 * prefill_s


def test_a_workload_that_shares_prefixes_has_fewer_tokens_to_compute() -> None:
    demand = Demand.of(parse_workload("fixed:n=10,prompt=100,output=21,shared=80,groups=2"))
    assert (demand.num_requests, demand.prompt_tokens, demand.decodes) == (10, 2 * 100 + 8 * 20, 200)
    assert demand.pair_tokens == (10 * 100 * 100 - 8 * 80 * 80) / 2
    assert demand.key_tokens == 10 * 20 * (100 + 10.5)
