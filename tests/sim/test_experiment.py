"""The prefix cache in simulated runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sarathi_pp.core.cost.model import CostModel, LayerCost, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import POLICIES, parse_policy
from sarathi_pp.sim.capacity import find_capacity
from sarathi_pp.sim.experiment import Experiment, report_of, simulate, simulate_replicas
from sarathi_pp.sim.workload import parse_workload

COST = CostModel(1, tuple(StageCost((stage, stage + 1), 0.5, 0.1, 0, 0, 0) for stage in range(2)))
PROFILE = Profile("m", "d", "float32", 1, 2, COST, 0.0, 1e30, 0.0, pages=1000, max_num_seqs=6)
PLAIN = "uniform:n=24,min=40,max=90,pd=10,seed=3"


def experiment(spec: str, **options: Any) -> Experiment:
    defaults = {"profile": PROFILE, "policy": parse_policy("sarathi"), "chunk_size": 32}
    return Experiment(workload=parse_workload(spec), **defaults | options)


def use_of(one: Experiment) -> dict[str, Any]:
    names = "mode", "prompt_tokens", "cached_tokens", "evictions"
    return {name: report_of(one)["prefix_cache"][name] for name in names}


def use(prompt_tokens: int, cached_tokens: int, evictions: int = 0) -> dict[str, Any]:
    names = "mode", "prompt_tokens", "cached_tokens", "evictions"
    return dict(zip(names, ("all", prompt_tokens, cached_tokens, evictions), strict=True))


def schedule(one: Experiment) -> list[tuple[float, str]]:
    return [(event.at_s, event.text) for event in simulate(one).issued]


def test_all_but_the_first_of_a_group_find_their_full_pages() -> None:
    """37 of 50 tokens are shared, so two pages of 16. Requests run one after the other."""
    shared = experiment("fixed:n=9,prompt=50,output=2,shared=37,groups=3", max_num_seqs=1)
    assert use_of(shared) == use(9 * 50, 6 * 32)
    issued = simulate(shared).issued
    assert sum(event.prefill_tokens for event in issued) == 9 * 50 - 6 * 32
    assert report_of(shared)["prefix_cache"]["hit_rate"] == pytest.approx(192 / 450)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_cache_changes_nothing_if_nothing_is_shared(policy: str) -> None:
    kind = parse_policy(policy)
    off, on = (experiment(PLAIN, policy=kind, prefix_cache=mode) for mode in ("off", "all"))
    assert schedule(off) == schedule(on)
    assert use_of(on) == use(sum(prompt for prompt, _ in on.workload.lengths()), 0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_request_is_answered_with_a_cache(policy: str) -> None:
    tight = Profile("m", "d", "float32", 1, 2, COST, 0.0, 1e30, 0.0, pages=14, max_num_seqs=6)
    spec = f"poisson:rate=0.4,{PLAIN},shared=36,groups=4"
    shared = experiment(spec, profile=tight, policy=parse_policy(policy))
    done = sorted((one.index, one.prompt_tokens, one.output_tokens) for one in simulate(shared).finished)
    assert done == [(index, *lengths) for index, lengths in enumerate(shared.workload.lengths())]
    assert use_of(shared)["evictions"] > 0


def test_without_shared_prefixes_there_is_no_cache_by_default() -> None:
    plain = experiment(PLAIN)
    assert plain.limits().prefix_cache == "off" and report_of(plain)["prefix_cache"] is None
    shared = f"{PLAIN},shared=20,groups=2"
    modes = ("auto", "off", "prompts", "all")
    found = [experiment(shared, prefix_cache=mode).limits().prefix_cache for mode in modes]
    assert found == ["all", "off", "prompts", "all"]
    assert schedule(experiment(shared, prefix_cache="off")) == schedule(plain)


def test_equally_long_prompts_are_not_equal() -> None:
    """A simulation without a cache draws no ids, and all its prompts consist of zeros. With a cache it draws them."""
    assert use_of(experiment("fixed:n=9,prompt=64,output=2", prefix_cache="all"))["cached_tokens"] == 0


def test_each_replica_has_a_cache_of_its_own() -> None:
    shared = experiment("fixed:n=12,prompt=48,output=3,shared=32", replicas=2)
    assert use_of(shared) == use(12 * 48, 10 * 32), "each replica computes the prefix once"
    ended = [one.index for timeline in simulate_replicas(shared) for one in timeline.finished]
    assert sorted(ended) == list(range(12))


def test_a_cpu_keeps_fewer_idle_pages() -> None:
    cpu = Profile("m", "cpu", "float32", 1, 2, COST, 0.0, 1e30, 0.0, pages=1000, max_num_seqs=6)
    assert experiment(PLAIN, profile=cpu).limits().most_idle_pages == 250
    assert experiment(PLAIN).limits().most_idle_pages is None


def test_a_cache_raises_the_rate_that_a_pipeline_can_serve() -> None:
    plain, shared = "fixed:n=60,prompt=100,output=2", "fixed:n=60,prompt=100,output=2,shared=96"
    before, after = (find_capacity(experiment(spec, chunk_size=128), tbt_slo_s=30.0).rate for spec in (plain, shared))
    assert before is not None and after is not None and after > 2 * before


def test_tokens_are_repeated_only_if_no_layer_keeps_a_state() -> None:
    """States must get each token once. A real run does not repeat tokens for them either."""
    kinds = ("linear", "attention")
    hybrid = replace(COST, layer_costs=tuple(LayerCost(kind, 0.5, 0.1, 0, 0, 0, page_bytes=0) for kind in kinds))
    overlapping = parse_policy("chunkllm:threshold=32,overlap=0.25")
    runs = [experiment(PLAIN, policy=overlapping, profile=replace(PROFILE, cost=cost)) for cost in (COST, hybrid)]
    repeated, once = (sum(event.prefill_tokens for event in simulate(one).issued) for one in runs)
    assert once == sum(prompt for prompt, _ in runs[0].workload.lengths()) < repeated
    assert [one.limits().num_slots for one in runs] == [0, 6]
