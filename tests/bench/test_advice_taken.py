"""Advice is taken, on the simulator: an option that is said to save time does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sarathi_pp.bench.profile import fit_cost
from sarathi_pp.core.cost import CostModel, StageCost
from sarathi_pp.core.policy import auto_chunk_size
from sarathi_pp.report.advice import Advice, advise
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.bubbles import measure_bubbles
from sarathi_pp.trace.summary import summarise_timeline

# Stages that wait long for each other, in runs that lack sequences, seats, arrivals or room in flight.
WORK = {
    "few seats": (2, "fixed:n=24,prompt=64,output=64", 8),
    "slow arrivals": (2, "poisson:rate=1,uniform:n=60,min=64,max=256,pd=8,seed=1", 64),
    "many seats": (4, "uniform:n=40,min=64,max=512,pd=4,seed=2", 16),
}
TAKEN = {"--inflight": "inflight", "--max-num-seqs": "max_num_seqs"}


def run(work: str, policy: str, **options: int) -> tuple[float, list[Advice]]:
    """Seconds of the run, and what is advised after it."""
    num_stages, spec, seats = WORK[work]
    cost = CostModel(1, tuple(StageCost((i, i + 1), 5e-3, 1e-4, 2e-8, 1e-7, 2e-5) for i in range(num_stages)))
    profile = replace(preset("gpt3-a100-tp8pp8"), cost=cost, num_layers=num_stages, link_latency_s=5e-3, pages=20_000)
    settings: dict[str, Any] = {"max_num_seqs": seats, **options}
    timeline = simulate(
        Experiment(
            profile=profile,
            workload=parse_workload(spec),
            policy=policy,
            chunk_size=auto_chunk_size(policy),
            **settings,
        )
    )
    report = summarise_timeline(timeline, measure_bubbles(timeline), fit_cost)
    return report["wall_s"], advise(report | {"max_num_seqs": settings["max_num_seqs"]})


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("policy", ["balanced", "sarathi", "orca", "sglang"])
def test_what_is_advised_shortens_the_run(work: str, policy: str) -> None:
    wall_s, found = run(work, policy)
    for advice in found:
        option, _, value = advice.option.partition(" ")
        if option in TAKEN:
            assert run(work, policy, **{TAKEN[option]: int(value)})[0] < 0.99 * wall_s, advice.text


def test_a_run_that_keeps_up_with_its_arrivals_is_let_be() -> None:
    assert [run("slow arrivals", policy)[1] for policy in ("balanced", "sarathi", "orca")] == [[], [], []]


def test_more_seats_are_advised_where_all_that_have_one_are_in_flight() -> None:
    _, found = run("few seats", "sarathi")
    assert "--max-num-seqs 16" in [advice.option for advice in found]
