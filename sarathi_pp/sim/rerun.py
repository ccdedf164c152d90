"""A recorded run once more, on the simulator: what another option would have done to its wall time.

Its requests with their arrivals and lengths, what microbatches cost in it and how long its links took are the recorded
ones. One simulation is compared with another, so what the simulator does not know of is missing from both.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Self

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.cost import CostModel
from sarathi_pp.core.cut import recut
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import auto_chunk_size, auto_inflight, make_policy, wants_cost
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.sim.pipeline import Link, VirtualPipeline
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.trace.events import Event, Issued, RequestFinished, Returned
from sarathi_pp.trace.timeline import Timeline

# Of a long run the first requests are simulated, as many as took about so many microbatches times stages: a second.
_MOST_SPANS = 20_000


@dataclass(frozen=True, slots=True)
class Change:
    """Options as they might have been; None for as they were.

    layers: of each stage, and so how many stages. times: the same requests so many times over, one after the other.
    """

    policy: str | None = None
    chunk_size: int | None = None
    max_num_seqs: int | None = None
    inflight: int | None = None
    num_pages: int | None = None
    layers: tuple[int, ...] | None = None
    times: int = 1


class _Asked(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Rerun:
    """The run to be compared with. limits, policy, cost: as it had them; link: as it was."""

    requests: tuple[_Asked, ...]
    limits: Limits
    policy: str
    cost: CostModel
    link: Link
    _walls_s: dict[Change, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        cost: CostModel,
        link: Link,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
    ) -> Self | None:
        """None where nobody knows what the requests asked for: a run that goes on, was killed or answered nothing.

        cost: of its microbatches. max_num_seqs, max_model_len: what it allowed; None for as much as there was.
        """
        ended = sorted(timeline.finished, key=lambda request: request.index)
        answered = [request for request in ended if request.finish_reason != "error"]
        if not answered or len(ended) < len(timeline.arrived) or any(stage.end is None for stage in timeline.stages):
            return None
        start = timeline.stages[0].start
        seats = max_num_seqs or len(ended)
        share = min(1.0, _MOST_SPANS / (len(timeline.issued) * start.num_stages or 1))
        asked = tuple(_asked(answered[: max(1, round(share * len(answered)))], seats))
        limits = Limits(
            num_stages=start.num_stages,
            chunk_size=start.chunk_size,
            max_num_seqs=seats,
            max_model_len=max_model_len or max(request.prompt_tokens + request.output_tokens for request in asked),
            page_size=start.page_size,
            num_pages=start.num_pages,
            inflight=start.inflight,
        )
        return cls(asked, limits, start.policy, cost, link)

    def saved(self, change: Change) -> float:
        """Share of the wall time that as much work takes less with it; below 0 where it takes longer."""
        before_s, after_s = self.wall_s(Change()), self.wall_s(change)
        return 1 - after_s / (change.times * before_s) if before_s else 0.0

    def wall_s(self, change: Change) -> float:
        """From the first issue to the last result."""
        if change not in self._walls_s:
            policy, limits, cost = self._with(change)
            window = _Window()
            known = cost if wants_cost(policy) else None
            simulation = Simulation(limits, make_policy(policy), VirtualPipeline(cost, self.link), window.record, known)
            simulation.run(self._requests(change.times))
            self._walls_s[change] = window.seconds
        return self._walls_s[change]

    def _with(self, change: Change) -> tuple[str, Limits, CostModel]:
        """What another policy, or another number of stages, brings with it is what it has by itself."""
        policy, cost, limits = change.policy or self.policy, self.cost, self.limits
        if change.layers is not None:
            cost = recut(cost, partition(sum(change.layers), len(change.layers), change.layers))
        stages = len(cost.stages)
        if change.policy is not None:
            limits = replace(limits, chunk_size=auto_chunk_size(policy))
        if change.policy is not None or stages != limits.num_stages:
            limits = replace(limits, num_stages=stages, inflight=auto_inflight(policy, stages))
        names = ("chunk_size", "max_num_seqs", "inflight", "num_pages")
        given = {name: value for name in names if (value := getattr(change, name)) is not None}
        return policy, replace(limits, **given), cost

    def _requests(self, times: int) -> Iterator[Request]:
        last_s = self.requests[-1].arrival_s
        for time in range(times):
            for index, asked in enumerate(self.requests):
                sampling = SamplingParams(max_new_tokens=asked.output_tokens, ignore_eos=True, seed=0)
                number = time * len(self.requests) + index
                yield Request(number, (0,) * asked.prompt_tokens, sampling, time * last_s + asked.arrival_s)


def _asked(answered: Iterable[RequestFinished], seats: int) -> Iterator[_Asked]:
    """The requests in order of arrival, from the first one's.

    Who reads a file reads no more ahead than that many, so where as many wait, the next one was there before it was
    read: it is taken to have come with the one before it.
    """
    first_s = arrival_s = -inf
    issues_s: list[float] = []  # of all that have arrived, sorted
    for request in answered:
        num_waiting = len(issues_s) - bisect_right(issues_s, request.arrived_s)
        if num_waiting < seats:
            arrival_s = max(arrival_s, request.arrived_s)
        first_s = arrival_s if first_s == -inf else first_s
        insort(issues_s, inf if request.first_issue_s is None else request.first_issue_s)
        yield _Asked(request.prompt_tokens, request.output_tokens, arrival_s - first_s)


@dataclass(slots=True)
class _Window:
    first_s: float = inf
    last_s: float = -inf

    @property
    def seconds(self) -> float:
        return max(0.0, self.last_s - self.first_s)

    def record(self, stage: int, event: Event) -> None:
        if isinstance(event, Issued):
            self.first_s = min(self.first_s, event.at_s)
        elif isinstance(event, Returned):
            self.last_s = max(self.last_s, event.at_s)
