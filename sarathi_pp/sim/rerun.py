"""A recorded run once more, on the simulator: what another option would have done to its times.

Its requests with their arrivals and lengths, what microbatches cost in it, how long its links took and what its hosts
took for each microbatch are the recorded ones. One simulation is compared with another, so what the simulator does not
know of is missing from both; and where that is much, so that the run itself does not come out as long as it was,
nothing is said.

Of a long run the first requests are simulated, until so many have finished that the last ones start: what comes then,
a pipeline that drains, is not in the run at that time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import fmean
from typing import NamedTuple, Self

from sarathi_pp.analysis.causes import host_seconds
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.config import SamplingParams
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import Limits, PolicySpec, parse_recorded
from sarathi_pp.core.request import Request
from sarathi_pp.sim.pipeline import Link, Links, VirtualPipeline
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.trace.events import Event, Issued, RequestFinished

# Of a long run the first requests are simulated: as many as take about half a second, where a stage takes a microbatch
# in one step and the coordinator a chunk in an eighth of one.
_MOST_STEPS = 10_000
_CHUNKS_A_STEP = 8
# But at least so many times what may run at once in any trial, or it would be all filling and draining; if that takes
# no more than so much longer, and no trial so much longer still.
_LEAST_SEATFULS = 2.5
_MOST_OVER = 4
# The run as it was may come out longer or shorter than it was by this share.
_MOST_OFF = 0.2


@dataclass(frozen=True, slots=True)
class Change:
    """Options as they might have been; None for as they were.

    layers: of each stage, and so how many stages. times: the same requests so many times over, one after the other.
    """

    policy: PolicySpec | None = None
    chunk_size: int | None = None
    max_num_seqs: int | None = None
    inflight: int | None = None
    num_pages: int | None = None
    layers: tuple[int, ...] | None = None
    times: int = 1


class CannotTry(Exception):
    """Why nothing can be said of a run that is over."""


class _Asked(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    arrival_s: float


class _Times(NamedTuple):
    """wall_s: from the first issue to the last answer that counts. first_token_s: mean from a request's first issue."""

    wall_s: float
    first_token_s: float


# Of a trial that would take too long.
_GIVEN_UP = _Times(inf, inf)


def most_seats(seats: int, num_stages: int) -> int:
    """To be tried where there are that many: twice as many, or as many as four a stage."""
    return max(2 * seats, 4 * num_stages)


@dataclass(frozen=True, slots=True)
class Rerun:
    """The run to be compared with. limits, policy, cost: as it had them; links: as they were. host_s: of each stage,
    for each microbatch, before it computes. counted: answers after which times are taken. max_pages: that memory could
    hold. pages_follow_layers: a stage holds fewer pages of more layers. moves_head: the first stage computed heads too.
    """

    requests: tuple[_Asked, ...]
    limits: Limits
    policy: PolicySpec
    cost: CostModel
    links: Links
    host_s: tuple[float, ...]
    counted: int
    max_pages: int
    pages_follow_layers: bool = True
    moves_head: bool = False
    _tried: dict[Change, _Times] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        cost: CostModel,
        links: Links,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_pages: int | None = None,
        request_rate: float | None = None,
        pages_follow_layers: bool = True,
    ) -> Self | None:
        """None where there is nothing to be told: a run that goes on, was killed or answered nothing, a policy that is
        not built in, a trace in which more was answered than computed.

        cost: of its microbatches. max_num_seqs, max_model_len: what it allowed; None for as much as there was.
        max_pages: that its memory could hold; None for no more than it had. request_rate: None where requests were
        there as soon as they were read. pages_follow_layers: False for emulated stages, whose pages a profile tells.
        Raises CannotTry where that would take too long, or where the simulator does not find it as long as it was.
        """
        start = timeline.stages[0].start
        policy = parse_recorded(start.policy)
        ended = sorted(timeline.finished, key=lambda request: request.index)
        answered = [r for r in ended if r.finish_reason != "error" and r.first_issue_s is not None]
        unfinished = len(ended) < len(timeline.arrived) or any(stage.end is None for stage in timeline.stages)
        if not answered or unfinished or policy is None or not _were_computed(answered, timeline):
            return None
        seats = max_num_seqs or len(ended)
        first, counted = _sample(timeline, len(answered), most_seats(seats, start.num_stages))
        answered = answered[:first]
        asked = tuple(_asked(answered, inf if request_rate else seats))
        longest = max(request.prompt_tokens + request.output_tokens for request in asked)
        limits = Limits(
            num_stages=start.num_stages,
            chunk_size=start.chunk_size,
            max_num_seqs=seats,
            max_model_len=max(max_model_len or 0, longest),
            page_size=start.page_size,
            num_pages=start.num_pages,
            inflight=start.inflight,
        )
        hosts_s = tuple(host_seconds(timeline))
        most_pages = max(max_pages or 0, start.num_pages)
        moves_head = len(timeline.stages[0].heads.microbatches) > 0
        rerun = cls(asked, limits, policy, cost, links, hosts_s, counted, most_pages, pages_follow_layers, moves_head)
        measured_s = sorted(request.finished_s for request in answered)[counted - 1] - timeline.window[0]
        found_s = rerun.wall_s(Change())
        if abs(found_s - measured_s) > _MOST_OFF * measured_s:
            raise CannotTry(f"{measured_s:.2f} s of the run are {found_s:.2f} s on the simulator")
        return rerun

    def saved(self, change: Change) -> float:
        """Share of the wall time that as much work takes less with it; below 0 where it takes longer.

        Of a run that is not simulated to its end, more requests save nothing to speak of.
        """
        if change.times > 1 and self.counted < len(self.requests):
            return 0.0
        before_s, after_s = self.wall_s(Change()), self.wall_s(change)
        return 1 - after_s / (change.times * before_s) if before_s else 0.0

    def sooner(self, change: Change) -> float:
        """Share of the time from a request's first issue to its first token that it takes less with it, as `saved`."""
        before_s, after_s = self._times(Change()).first_token_s, self._times(change).first_token_s
        return 1 - after_s / before_s if before_s else 0.0

    def wall_s(self, change: Change) -> float:
        """From the first issue to the last answer that counts; infinite where that takes too long to be tried."""
        return self._times(change).wall_s

    def _times(self, change: Change) -> _Times:
        if change not in self._tried:
            self._tried[change] = self._simulate(change)
        return self._tried[change]

    def _simulate(self, change: Change) -> _Times:
        policy, limits, cost = self._with(change)
        watch = _Watch(change.times * self.counted, len(cost.stages))
        known = cost if policy.kind.wants_cost else None
        heads = HeadPlacement(cost) if self.moves_head and len(cost.stages) > 1 else None
        pipeline = VirtualPipeline(self._with_hosts(cost), self._links(len(cost.stages)))
        simulation = Simulation(limits, policy.make(), pipeline, watch.record, known, heads)
        with suppress(_Enough):
            simulation.run(self._requests(change.times))
        return watch.times

    def _with(self, change: Change) -> tuple[PolicySpec, Limits, CostModel]:
        """What another policy, or another number of stages, brings with it is what it has by itself; but as many in
        flight as somebody chose stay as many.
        """
        policy, cost, limits = change.policy or self.policy, self.cost, self.limits
        chosen = limits.inflight != self.policy.inflight(limits.num_stages)
        if change.layers is not None:
            cost = repartition(cost, partition(sum(change.layers), len(change.layers), change.layers))
        limits = replace(limits, num_stages=len(cost.stages), num_pages=self._pages(change, cost))
        if change.policy is not None:
            limits = replace(limits, chunk_size=policy.kind.default_chunk_size)
        if not chosen:
            limits = replace(limits, inflight=policy.inflight(limits.num_stages))
        names = ("chunk_size", "max_num_seqs", "inflight", "num_pages")
        given = {name: value for name in names if (value := getattr(change, name)) is not None}
        return policy, replace(limits, **given), cost

    def _pages(self, change: Change, cost: CostModel) -> int:
        """As many as seats can take, if memory holds them: fewer of more layers. The longest request fits."""
        limits, pages = self.limits, self.max_pages
        if self.pages_follow_layers:
            pages = pages * _most_layers(self.cost) // _most_layers(cost)
        of_a_seat = -(-limits.max_model_len // limits.page_size)
        if limits.num_pages == limits.max_num_seqs * of_a_seat:
            pages = min(pages, of_a_seat * (change.max_num_seqs or limits.max_num_seqs))
        longest = max(request.prompt_tokens + request.output_tokens for request in self.requests)
        return max(pages, -(-longest // limits.page_size))

    def _with_hosts(self, cost: CostModel) -> CostModel:
        """A stage that its host keeps busy is as good as one that computes for longer."""
        mean_s = sum(self.host_s) / len(self.host_s)
        hosts_s = self.host_s if len(cost.stages) == len(self.host_s) else (mean_s,) * len(cost.stages)
        stages = (replace(stage, a0=stage.a0 + host_s) for stage, host_s in zip(cost.stages, hosts_s, strict=True))
        return replace(cost, stages=tuple(stages))

    def _links(self, num_stages: int) -> Links:
        """Of another number of stages nobody knows which edge is the slow one, so all are as slow as the mean edge."""
        if num_stages == len(self.links):
            return self.links
        forward = self.links[:-1] or self.links
        latency_s = fmean(link.latency_s for link in forward)
        s_per_token = fmean(link.token_bytes / link.bytes_per_s for link in forward)
        return (Link(latency_s, 1 / s_per_token if s_per_token else inf, token_bytes=1),) * num_stages

    def _requests(self, times: int) -> Iterator[Request]:
        last_s = self.requests[-1].arrival_s
        period_s = last_s + last_s / max(1, len(self.requests) - 1)
        for time in range(times):
            for index, asked in enumerate(self.requests):
                sampling = SamplingParams(max_new_tokens=asked.output_tokens, ignore_eos=True, seed=0)
                number = time * len(self.requests) + index
                yield Request(number, (0,) * asked.prompt_tokens, sampling, time * period_s + asked.arrival_s)


def _were_computed(answered: Iterable[RequestFinished], timeline: Timeline) -> bool:
    """Each token but a request's last is computed, prompts included: a damaged trace may say otherwise."""
    left = sum(event.num_tokens for event in timeline.issued)
    for request in answered:
        left -= request.prompt_tokens + request.output_tokens - 1
        if request.prompt_tokens < 1 or request.output_tokens < 1 or left < 0:
            return False
    return True


def _sample(timeline: Timeline, count: int, seats: int) -> tuple[int, int]:
    """How many of the requests are simulated, and after how many of their answers times are taken. seats: the most that
    a trial has. Raises CannotTry where too few can be.
    """
    stages, chunks = len(timeline.stages), sum(event.decodes + event.num_chunks for event in timeline.issued)
    affordable = count * _MOST_STEPS / (len(timeline.issued) * stages + chunks / _CHUNKS_A_STEP)
    needed = min(count, max(round(affordable), ceil(_LEAST_SEATFULS * seats)))
    if needed > max(1.0, _MOST_OVER * affordable):
        raise CannotTry(f"{needed} of its requests would have to be simulated, {_MOST_OVER * affordable:.0f} can be")
    return needed, count if needed == count else needed - seats


def _most_layers(cost: CostModel) -> int:
    return max(end - first for first, end in (stage.layers for stage in cost.stages))


def _asked(answered: Iterable[RequestFinished], seats: float) -> Iterator[_Asked]:
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


class _Enough(Exception):
    """What is to be known is."""


class _Watch:
    """Takes the times of a simulation, and ends it after so many answers, or too many steps."""

    def __init__(self, answers: int, num_stages: int) -> None:
        self.times = _GIVEN_UP
        self._left = answers
        self._steps_left = float(_MOST_OVER * _MOST_OVER * _MOST_STEPS)
        self._num_stages = num_stages
        self._first_s = inf
        self._first_tokens_s: list[float] = []

    def record(self, stage: int, event: Event) -> None:
        if isinstance(event, Issued):
            self._first_s = min(self._first_s, event.at_s)
            self._steps_left -= self._num_stages + (event.decodes + event.num_chunks) / _CHUNKS_A_STEP
            if self._steps_left < 0:
                raise _Enough
        elif isinstance(event, RequestFinished):
            self._left -= 1
            assert event.first_issue_s is not None and event.first_token_s is not None
            self._first_tokens_s.append(event.first_token_s - event.first_issue_s)
            if self._left == 0:
                self.times = _Times(event.finished_s - self._first_s, fmean(self._first_tokens_s))
                raise _Enough
