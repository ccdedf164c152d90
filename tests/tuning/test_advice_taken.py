"""Advice is applied on the simulator: an option saves the time that the advice predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isfinite
from statistics import fmean
from typing import NamedTuple

import pytest

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.summary import summarise_timeline
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.report.advice import Advice, advise
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.rerun import Rerun
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.tuning.fit import fit_cost, fit_links


@dataclass(frozen=True)
class Work:
    """A pipeline of equal stages, or with a slower one, and its requests."""

    stages: int
    spec: str
    seats: int
    link_s: float = 0.0
    pages: int = 20_000
    slow: float = 1.0

    def experiment(self, policy: str) -> Experiment:
        speeds = [1.0] * (self.stages - 1) + [self.slow]
        costs = [StageCost((8 * i, 8 * i + 8), 5e-3, 1e-4, 2e-8, 1e-7, 2e-5).scaled(x) for i, x in enumerate(speeds)]
        profile = replace(
            preset("gpt3-a100-tp8pp8"),
            cost=CostModel(1, tuple(costs)),
            num_layers=8 * self.stages,
            link_latency_s=self.link_s,
            pages=self.pages,
        )
        return Experiment(
            profile=profile,
            workload=parse_workload(self.spec),
            policy=parse_policy(policy),
            chunk_size=parse_policy(policy).kind.default_chunk_size,
            max_num_seqs=self.seats,
        )


WORK = {
    "few seats": Work(2, "fixed:n=24,prompt=64,output=64", 8, link_s=5e-3),
    "few seats, prompts in many chunks": Work(2, "fixed:n=24,prompt=1024,output=16", 8, link_s=20e-3),
    "one seat, prompts in many chunks": Work(2, "fixed:n=6,prompt=8192,output=2", 1, link_s=20e-3),
    "three seats, few decodes": Work(2, "fixed:n=24,prompt=4096,output=60", 3),
    "many seats, few chunks": Work(4, "uniform:n=40,min=64,max=512,pd=4,seed=2", 16, link_s=5e-3),
    "short prompts": Work(4, "uniform:n=100,min=40,max=80,pd=1,seed=3", 128),
    "few pages": Work(3, "fixed:n=24,prompt=64,output=100", 16, link_s=15e-3, pages=40),
    "slow arrivals": Work(2, "poisson:rate=1,uniform:n=60,min=64,max=256,pd=8,seed=1", 64),
    "arrivals that soon fall behind": Work(4, "poisson:rate=6,uniform:n=60,min=64,max=2048,pd=8,seed=3", 32),
    "a slow stage": Work(2, "uniform:n=40,min=64,max=512,pd=8,seed=2", 32, slow=1.5),
    "few seats, slow arrivals": Work(2, "poisson:rate=3,uniform:n=60,min=64,max=512,pd=4,seed=2", 2),
    "few requests": Work(4, "fixed:n=2,prompt=600,output=60", 8),
}
POLICIES = ("balanced", "sarathi", "orca", "sglang")
# Relative to the run. A model fitted to one policy's microbatches is slightly wrong for another's.
NEAR, NEAR_OF_GAIN = 0.03, 0.25
# Fewer stages are not advised to save time.
SLOWER = 0.2
TAKE: dict[str, Callable[[Experiment, str], Experiment]] = {
    "--chunk-size": lambda e, value: replace(e, chunk_size=int(value)),
    "--max-num-seqs": lambda e, value: replace(e, max_num_seqs=int(value)),
    "--inflight": lambda e, value: replace(e, inflight=int(value)),
    "--policy": lambda e, value: with_policy(e, *value.split(" --chunk-size ")),
    "--kv-cache-memory": lambda e, value: replace(e, profile=replace(e.profile, pages=2 * e.profile.pages)),
    "--layer-split": lambda e, value: split(e, [int(layers) for layers in value.split(",")]),
    "--stages": lambda e, value: split(e, partition_evenly(e, int(value))),
    "--input": lambda e, value: replace(e, workload=parse_workload(twice(e.workload.spec))),
}


def with_policy(experiment: Experiment, policy: str, chunk_size: str | None = None) -> Experiment:
    spec = parse_policy(policy)
    return replace(experiment, policy=spec, chunk_size=int(chunk_size or spec.kind.default_chunk_size))


def twice(spec: str) -> str:
    arrivals, comma, work = spec.partition(",") if spec.startswith("poisson") else ("", "", spec)
    return f"{arrivals}{comma}then:{work}+{work}"


def split(experiment: Experiment, layers: list[int]) -> Experiment:
    """Split the available memory of stages among the layers that they hold."""
    profile = experiment.profile
    cost = repartition(profile.cost, partition(profile.num_layers, len(layers), layers))
    most = max(end - first for first, end in (stage.layers for stage in profile.cost.stages))
    return replace(experiment, profile=replace(profile, cost=cost, pages=profile.pages * most // max(layers)))


def partition_evenly(experiment: Experiment, stages: int) -> list[int]:
    return [end - first for first, end in partition(experiment.profile.num_layers, stages)]


class Run(NamedTuple):
    """Seconds of a run, seconds from a request's first chunk to its first token, and the advice after the run."""

    wall_s: float
    first_token_s: float
    advice: list[Advice]


def run(experiment: Experiment) -> Run:
    timeline = simulate(experiment)
    fitted = fit_cost(timeline)
    assert fitted is not None
    report = summarise_timeline(timeline, measure_bubbles(timeline), fitted)
    rate = experiment.workload.rate
    rerun = Rerun.of(
        timeline,
        fitted.model,
        fit_links(timeline),
        max_num_seqs=experiment.max_num_seqs,
        request_rate=rate if isfinite(rate) else None,
    )
    assert rerun is not None
    facts = {"max_num_seqs": experiment.max_num_seqs, "max_model_len": 8192, "kv_cache_bytes": 2**30}
    first_tokens_s = [(r.first_token_s or 0.0) - (r.first_issue_s or 0.0) for r in timeline.finished]
    return Run(report["wall_s"], fmean(first_tokens_s), advise(report | {"device": "cpu"} | facts, rerun))


@cache
def advised(work: str, policy: str) -> Run:
    return run(WORK[work].experiment(policy))


# By default, work runs with sarathi or orca, and every third with another policy too.
DEFAULT = {(POLICIES[1 + number % 2], work) for number, work in enumerate(WORK)}
DEFAULT |= {(POLICIES[3 * (number % 2)], work) for number, work in enumerate(WORK) if number % 3 == 0}


@pytest.mark.parametrize(
    ("policy", "work"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case not in DEFAULT)) for case in product(POLICIES, WORK)],
)
def test_what_is_advised_saves_what_it_says(work: str, policy: str) -> None:
    experiment, before = WORK[work].experiment(policy), advised(work, policy)
    for advice in before.advice:
        option, _, value = advice.option.partition(" ")
        after = run(TAKE[option](experiment, value))
        saved_s = before.wall_s - after.wall_s / (2 if option == "--input" else 1)
        if advice.rule == "one_request":
            told_s = float(advice.text.split()[-2])
            assert after.first_token_s < before.first_token_s, advice.text
            assert after.first_token_s == pytest.approx(told_s, rel=NEAR), advice.text
        elif option == "--stages":
            assert saved_s > -SLOWER * before.wall_s, advice.text
        else:
            near = pytest.approx(advice.gain_s, abs=NEAR * before.wall_s, rel=NEAR_OF_GAIN)
            assert saved_s > 0 and saved_s == near, advice.text


def test_every_option_is_advised_somewhere() -> None:
    """This makes the test above cover each option."""
    found = {advice.option.split()[0] for policy, work in DEFAULT for advice in advised(work, policy).advice}
    assert found == set(TAKE)


def test_a_run_that_keeps_up_with_its_arrivals_is_let_be() -> None:
    assert [advised("slow arrivals", policy).advice for policy in POLICIES] == [[]] * len(POLICIES)
