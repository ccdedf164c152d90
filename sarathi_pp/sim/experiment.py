"""One simulated run: from a profile, a workload and a policy to timelines, from which reports are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from sarathi_pp.analysis.replicas import Replica, summarise_replicas
from sarathi_pp.analysis.summary import Report
from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.head_placement import HeadPlacement, moves_head
from sarathi_pp.core.load_balancer import most_held, most_held_tokens
from sarathi_pp.core.pages import most_idle_pages
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import Limits, PolicySpec
from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.noise import Noise
from sarathi_pp.sim.pipeline import VirtualPipeline, links_of
from sarathi_pp.sim.replicas import run_replicas
from sarathi_pp.sim.simulation import Record, Simulation
from sarathi_pp.sim.workload import Workload
from sarathi_pp.trace.events import Event, TraceEnd, TraceStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The description of a simulation.

    Attributes:
        profile: cost model, links, noise and memory of the pipeline.
        stages: number of stages; None for that of the profile. Another number gets equal numbers of layers.
        replicas: number of pipelines of these stages that share the requests.
        max_num_seqs: most sequences that run at once in each replica; None for the profile's number.
        max_model_len: most tokens of a request; None for the longest request of the workload.
        inflight: most microbatches in flight; None for the policy's own number.
        jitter_cv: noise of stage times, as standard deviation / mean. None for the jitter and the drift of the profile.
        slow: factors on the times of the profile, by stage index from 0. Policies do not know them.
        seed: seed of the noise.
        head: stage of the LM head, "auto" or "last", as in RunConfig.
        prefix_cache: KV pages that requests share, as in RunConfig. "auto": "all" if the workload has shared prefixes,
            else "off". The cache needs token ids, so drawing the requests takes longer with it.
    """

    profile: Profile
    workload: Workload
    policy: PolicySpec
    chunk_size: int
    stages: int | None = None
    replicas: int = 1
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    inflight: int | None = None
    jitter_cv: float | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    head: str = "auto"
    prefix_cache: PrefixCacheMode | Literal["auto"] = "auto"

    def cost(self) -> CostModel:
        """Return the cost model of the stages, without the factors of `slow`. Policies may know it."""
        cost = self.profile.cost
        if self.stages is None or self.stages == len(cost.stages):
            return cost
        return repartition(cost, partition(self.profile.num_layers, self.stages))

    def limits(self) -> Limits:
        """Return the fixed numbers that scheduling depends on, such as chunk size and KV pages.

        Raises:
            ConfigError: a request of the workload can never fit, or `slow` names a stage that the run does not have.
        """
        num_stages = len(self.cost().stages)
        room = self.profile.pages * self.profile.page_size
        if any(stage >= num_stages for stage in self.slow):
            raise ConfigError(f"slow stage {max(self.slow)}: there are stages 0 to {num_stages - 1}")
        if self.workload.max_tokens > room:
            raise ConfigError(
                f"{self.workload.spec} has requests of up to {self.workload.max_tokens} tokens; the KV pool of "
                f"{self.profile.model} holds {room} tokens: use shorter requests, or a profile with more pages"
            )
        max_num_seqs = self.max_num_seqs or self.profile.max_num_seqs
        return Limits(
            num_stages=num_stages,
            chunk_size=self.chunk_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len or self.workload.max_tokens,
            page_size=self.profile.page_size,
            num_pages=self.profile.pages,
            inflight=self.inflight or self.policy.inflight(num_stages),
            prefix_cache=self._prefix_cache(),
            most_idle_pages=most_idle_pages(self.profile.device, self.profile.pages),
            num_slots=max_num_seqs if self.profile.cost.keeps_states else 0,
        )

    def _prefix_cache(self) -> PrefixCacheMode:
        if self.profile.cost.keeps_states:
            if self.prefix_cache not in ("auto", "off"):
                raise ConfigError(
                    f"--prefix-cache is {self.prefix_cache}; some layers of {self.profile.model} keep one state per "
                    "sequence, so sequences share no pages. Give --prefix-cache off, or leave it out"
                )
            return "off"
        if self.prefix_cache != "auto":
            return self.prefix_cache
        return "all" if self.workload.shares_prefixes else "off"


def report_of(experiment: Experiment) -> Report:
    """Simulate the experiment. Return its report: that of a real run, without the causes of the bubble."""
    return summarise_replicas([Replica.fold(timeline) for timeline in simulate_replicas(experiment)])


def simulate(experiment: Experiment) -> Timeline:
    """Simulate an experiment with one replica. Return its timeline, which holds the times of every microbatch.

    The times are the same on every machine.
    """
    (timeline,) = simulate_replicas(experiment)
    return timeline


def simulate_replicas(experiment: Experiment) -> list[Timeline]:
    """Simulate the experiment. Return the timeline of each replica."""
    timelines = [_begun(experiment, replica) for replica in range(experiment.replicas)]
    run(experiment, *map(_adding, timelines))
    for stage in chain.from_iterable(timeline.stages for timeline in timelines):
        stage.end = TraceEnd(at_s=stage.ends[-1] if stage.ends else 0.0)
        stage.align()
    return timelines


def run(experiment: Experiment, *records: Record) -> None:
    """Simulate the experiment. Call a function with each event when it happens, and keep no events in memory.

    Args:
        records: the functions that take the events of a replica, one per replica.
    """
    limits = experiment.limits()
    # Without ids, all prompts would begin equally.
    requests = experiment.workload.requests(token_ids=limits.prefix_cache != "off")
    if len(records) == 1:
        _simulation(experiment, limits, 0, records[0]).run(requests)
        return

    def make(replica: int, record: Record) -> Simulation:
        return _simulation(experiment, limits, replica, record)

    most, most_tokens = most_held(limits.max_num_seqs), most_held_tokens(limits.num_pages * limits.page_size)
    run_replicas(make, records, most, most_tokens, requests, PrefixRoutes.of(limits))


def _simulation(experiment: Experiment, limits: Limits, replica: int, record: Record) -> Simulation:
    cost = experiment.cost()
    true_stages = [stage.scaled(experiment.slow.get(index, 1.0)) for index, stage in enumerate(cost.stages)]
    pipeline = VirtualPipeline(
        replace(cost, stages=tuple(true_stages)),
        links_of(experiment.profile, len(true_stages)),
        _noise(experiment, len(true_stages), replica),
        head_factor=experiment.slow.get(0, 1.0) / experiment.slow.get(len(true_stages) - 1, 1.0),
        host_s=experiment.profile.host_s,
    )
    known = cost if experiment.policy.kind.wants_cost else None
    profile = experiment.profile
    moves = moves_head(experiment.head, profile.device, len(true_stages), profile.tensor_parallel_size)
    heads = HeadPlacement(cost) if moves else None
    return Simulation(limits, experiment.policy.make(), pipeline, record, known, heads)


def _begun(experiment: Experiment, replica: int) -> Timeline:
    """Return the timeline of a replica at the start. It has the stages, and no events."""
    timeline = Timeline()
    timeline.stages = [StageTimeline(start) for start in trace_starts(experiment, replica)]
    return timeline


def _adding(timeline: Timeline) -> Record:
    """Return a function that adds each event to the timeline."""

    def record(stage: int, event: Event) -> None:
        timeline.add(timeline.stages[stage], event)

    return record


# Distance between the seeds of replicas, so that their noise differs.
_SEEDS_APART = 1 << 32


def _noise(experiment: Experiment, num_stages: int, replica: int) -> Noise:
    """Return the noise of a replica's stage times: the profile's, or only jitter if the experiment sets it."""
    profile, seed = experiment.profile, experiment.seed + replica * _SEEDS_APART
    if experiment.jitter_cv is not None:
        return Noise(num_stages, experiment.jitter_cv, seed=seed)
    return Noise(num_stages, profile.jitter_cv, profile.drift, seed)


def trace_starts(experiment: Experiment, replica: int = 0) -> list[TraceStart]:
    """Return the first event of each stage's trace, as a real run writes it."""
    limits, stages = experiment.limits(), experiment.cost().stages
    return [
        TraceStart(
            at_s=0.0,
            unix_s=0.0,
            rank=replica * len(stages) + index,
            stage=index,
            num_stages=len(stages),
            layers=stage.layers,
            host="simulated",
            pid=0,
            device=experiment.profile.device,
            policy=str(experiment.policy),
            chunk_size=limits.chunk_size,
            inflight=limits.inflight,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            replica=replica,
            num_replicas=experiment.replicas,
            prefix_cache=limits.prefix_cache,
        )
        for index, stage in enumerate(stages)
    ]
