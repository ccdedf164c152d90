"""One simulated run from a profile, a workload and a policy to the timeline that every report reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sarathi_pp.core.cost import CostModel
from sarathi_pp.core.cut import recut
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import auto_inflight, make_policy, wants_cost
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.profile import Profile
from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.noise import Noise
from sarathi_pp.sim.pipeline import VirtualPipeline, links_of
from sarathi_pp.sim.simulation import Record, Simulation
from sarathi_pp.sim.workload import Workload
from sarathi_pp.trace.bubbles import measure_bubbles
from sarathi_pp.trace.events import Event, TraceEnd, TraceStart
from sarathi_pp.trace.summary import Report, summarise_timeline
from sarathi_pp.trace.timeline import StageTimeline, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to simulate. None: as the profile has it.

    max_model_len: None for the longest request of the workload. inflight: most microbatches at once, None for what the
    policy takes. slow: stages, by index, that take this many times what the profile says; policies are not told. seed:
    of the noise.
    """

    profile: Profile
    workload: Workload
    policy: str
    chunk_size: int
    stages: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    inflight: int | None = None
    jitter_cv: float | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def cost(self) -> CostModel:
        """The stages as policies know them."""
        cost = self.profile.cost
        if self.stages is None or self.stages == len(cost.stages):
            return cost
        return recut(cost, partition(self.profile.num_layers, self.stages))

    def limits(self) -> Limits:
        """Raises ConfigError where the workload has requests that never fit, or a slow stage is none of those there."""
        num_stages = len(self.cost().stages)
        room = self.profile.pages * self.profile.page_size
        if any(stage >= num_stages for stage in self.slow):
            raise ConfigError(f"slow stage {max(self.slow)}: there are stages 0 to {num_stages - 1}")
        if self.workload.max_tokens > room:
            raise ConfigError(
                f"{self.workload.spec} has requests of up to {self.workload.max_tokens} tokens; the KV pool of "
                f"{self.profile.model} holds {room}: use shorter ones, or a profile with more pages"
            )
        return Limits(
            num_stages=num_stages,
            chunk_size=self.chunk_size,
            max_num_seqs=self.max_num_seqs or self.profile.max_num_seqs,
            max_model_len=self.max_model_len or self.workload.max_tokens,
            page_size=self.profile.page_size,
            num_pages=self.profile.pages,
            inflight=self.inflight or auto_inflight(self.policy, num_stages),
        )


def report_of(experiment: Experiment) -> Report:
    """Run it, for the report that a real run of it would have, without causes."""
    timeline = simulate(experiment)
    return summarise_timeline(timeline, measure_bubbles(timeline))


def simulate(experiment: Experiment) -> Timeline:
    """Run it. Times are exact and the same on every machine; the timeline holds every microbatch of the run."""
    timeline = Timeline()
    timeline.stages = [StageTimeline(start) for start in trace_starts(experiment)]

    def record(stage: int, event: Event) -> None:
        timeline.add(timeline.stages[stage], event)

    run(experiment, record)
    for stage in timeline.stages:
        stage.end = TraceEnd(at_s=stage.ends[-1] if stage.ends else 0.0)
        stage.align()
    return timeline


def run(experiment: Experiment, record: Record) -> None:
    """The same, telling each event as it happens and keeping none."""
    cost = experiment.cost()
    true_stages = [stage.scaled(experiment.slow.get(index, 1.0)) for index, stage in enumerate(cost.stages)]
    pipeline = VirtualPipeline(
        CostModel(cost.tile, tuple(true_stages)),
        links_of(experiment.profile, len(true_stages)),
        _noise(experiment, len(true_stages)),
    )
    policy = make_policy(experiment.policy)
    known = cost if wants_cost(experiment.policy) else None
    simulation = Simulation(experiment.limits(), policy, pipeline, record, known)
    simulation.run(experiment.workload.requests(token_ids=False))


def _noise(experiment: Experiment, num_stages: int) -> Noise:
    """The profile's, or jitter alone where that is given."""
    profile = experiment.profile
    if experiment.jitter_cv is not None:
        return Noise(num_stages, experiment.jitter_cv, seed=experiment.seed)
    return Noise(num_stages, profile.jitter_cv, profile.drift, experiment.seed)


def trace_starts(experiment: Experiment) -> list[TraceStart]:
    """The first event of each stage's trace."""
    limits, stages = experiment.limits(), experiment.cost().stages
    return [
        TraceStart(
            at_s=0.0,
            unix_s=0.0,
            rank=index,
            stage=index,
            num_stages=len(stages),
            layers=stage.layers,
            host="simulated",
            pid=0,
            device=experiment.profile.device,
            policy=experiment.policy,
            chunk_size=limits.chunk_size,
            inflight=limits.inflight,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
        )
        for index, stage in enumerate(stages)
    ]
