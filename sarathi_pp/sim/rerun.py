"""A recorded run, repeated in the simulator to predict its time with another option.

The simulation uses the recorded facts: the requests with their arrivals and lengths, the cost of microbatches, the
times of links, and the time of hosts per microbatch. Tokens that a request found in the prefix cache are found again,
and are not computed. The run is simulated with and without the change, so effects that the simulator does not know are
missing from both. If they are large, the simulated run without a change is not as long as the real one. Then there is
no result.

Of a long run only the first requests are simulated. Times are read before the last of these have finished, because the
simulated pipeline then drains (less and less of it is in use). The real run did not drain at that time.
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
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import Limits, PolicySpec, parse_recorded
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.sim.pipeline import Link, Links, VirtualPipeline
from sarathi_pp.sim.simulation import Simulation
from sarathi_pp.trace.events import Event, Issued, RequestFinished

# Of a long run only the first requests are simulated, with about this number of steps, which take half a second. A
# stage takes one step per microbatch, and the coordinator an eighth of a step per chunk.
_MOST_STEPS = 10_000
_CHUNKS_A_STEP = 8
# At least this number times the most seats of any trial (requests that run at once) are simulated. With fewer requests,
# the pipeline would mostly fill and drain. That may take up to _MOST_OVER times the steps, and a single trial up to
# _MOST_OVER times more.
_LEAST_SEATFULS = 2.5
_MOST_OVER = 4
# The simulated run may be longer or shorter than the real one by this share.
_MOST_OFF = 0.2


@dataclass(frozen=True, slots=True)
class Change:
    """The options that a trial changes. None means no change.

    Attributes:
        layers: number of layers, stage by stage. It also gives the number of stages.
        times: repetitions of the same requests, one after the other.
    """

    policy: PolicySpec | None = None
    chunk_size: int | None = None
    max_num_seqs: int | None = None
    inflight: int | None = None
    num_pages: int | None = None
    layers: tuple[int, ...] | None = None
    times: int = 1


class CannotTry(Exception):
    """An error: changes cannot be tried on this run. The message gives the reason."""


class _Asked(NamedTuple):
    """A request of the recorded run.

    Attributes:
        arrival_s: its arrival in seconds after the first one.
        cached_tokens: number of its prompt tokens that it found in the prefix cache.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    cached_tokens: int


class _Times(NamedTuple):
    """The times of a trial, in seconds.

    Attributes:
        wall_s: from the first issue to the last answer that counts (Rerun.counted).
        first_token_s: mean time from a request's first issue to its first token.
    """

    wall_s: float
    first_token_s: float


# The times of a trial that was given up because it takes too many steps.
_GIVEN_UP = _Times(inf, inf)


def most_seats(seats: int, num_stages: int) -> int:
    """Return the most seats (requests that run at once) that trials of a run with `seats` of them use.

    It is twice that number, or four per stage if that is more.
    """
    return max(2 * seats, 4 * num_stages)


@dataclass(frozen=True, slots=True)
class Rerun:
    """A recorded run that can be simulated with and without a change.

    Attributes:
        requests: the requests to simulate, in order of arrival.
        limits, policy, cost, links: those of the recorded run.
        host_s: per stage, the seconds that its host takes before each microbatch computes.
        counted: number of answers after which the simulated time is read.
        max_pages: most KV pages that the memory of the stages could hold.
        pages_follow_layers: True if a stage with more layers has memory for fewer pages.
        moves_head: True if the first stage computed LM heads too.
        state_pages: KV pages that take as much memory as the states of one more sequence; 0 without states.
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
    state_pages: float = 0.0
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
        keeps_states: bool = False,
        state_pages: float = 0.0,
    ) -> Self | None:
        """Return the rerun of a recorded run, or None if the run cannot be repeated.

        It cannot be repeated if it still runs, was killed or answered nothing, or if its policy is not built in. The
        same holds if its trace is damaged, so that it has more answered than computed tokens.

        Args:
            cost: cost model that was fitted to the run's microbatches.
            links: latencies and rates of the run's links.
            max_num_seqs, max_model_len: limits of the run; None for as much as it used.
            max_pages: pages that its memory could hold; None for no more than it had.
            request_rate: arrivals per second; None if requests arrived as soon as they were read.
            pages_follow_layers: False for emulated stages, whose pages are from a profile.
            keeps_states: layers keep a state per sequence, so policies repeat no tokens.
            state_pages: see Rerun.

        Raises:
            CannotTry: it would take too long, the simulated run is not as long as the real one, or the run both found
                tokens in the prefix cache and preempted requests.
        """
        start = timeline.stages[0].start
        policy = parse_recorded(start.policy)
        order = {request.index: place for place, request in enumerate(timeline.arrived)}
        ended = sorted(timeline.finished, key=lambda request: order.get(request.index, request.index))
        answered = [r for r in ended if r.finish_reason != "error" and r.first_issue_s is not None]
        unfinished = len(ended) < len(timeline.arrived) or any(stage.end is None for stage in timeline.stages)
        if not answered or unfinished or policy is None or not _were_computed(answered, timeline):
            return None
        _check_hits(answered)
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
            prefix_cache="off",  # a trace has no token ids, and the prompts of `_requests` are all equal
            num_slots=seats if keeps_states else 0,
            issues_ahead=start.issues_ahead,
        )
        hosts_s = tuple(host_seconds(timeline))
        most_pages = max(max_pages or 0, start.num_pages)
        moves_head = len(timeline.stages[0].heads.microbatches) > 0
        follow = pages_follow_layers
        rerun = cls(asked, limits, policy, cost, links, hosts_s, counted, most_pages, follow, moves_head, state_pages)
        measured_s = sorted(request.finished_s for request in answered)[counted - 1] - timeline.window[0]
        found_s = rerun.wall_s(Change())
        if abs(found_s - measured_s) > _MOST_OFF * measured_s:
            raise CannotTry(
                f"the simulator takes {found_s:.2f} s for {measured_s:.2f} s of the run. "
                f"Predicted gains are shown only if the two differ by at most {_MOST_OFF:.0%}"
            )
        return rerun

    def saved(self, change: Change) -> float:
        """Return the share of the wall time that the change saves for the same work; below 0 if it takes longer.

        If only a part of the run is simulated, a repetition of its requests (`change.times`) counts as no saving.
        """
        if change.times > 1 and self.counted < len(self.requests):
            return 0.0
        before_s, after_s = self.wall_s(Change()), self.wall_s(change)
        return 1 - after_s / (change.times * before_s) if before_s else 0.0

    def sooner(self, change: Change) -> float:
        """Return the share that the change saves of the mean time from a request's first issue to its first token."""
        before_s, after_s = self._times(Change()).first_token_s, self._times(change).first_token_s
        return 1 - after_s / before_s if before_s else 0.0

    def wall_s(self, change: Change) -> float:
        """Return the simulated seconds with this change, from the first issue to the last answer that is counted.

        They are infinite if the trial was given up because it takes too many steps.
        """
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
        hits = [request.cached_tokens for request in self.requests]
        simulation = Simulation(
            limits, policy.make(), pipeline, watch.record, known, heads, hits if any(hits) else None
        )
        with suppress(_Enough):
            simulation.run(self._requests(change.times))
        return watch.times

    def _with(self, change: Change) -> tuple[PolicySpec, Limits, CostModel]:
        """Return policy, limits and cost after the change.

        Another policy or another number of stages brings its own defaults. But if the user chose the number of
        microbatches in flight, it stays.
        """
        policy, cost, limits = change.policy or self.policy, self.cost, self.limits
        chosen = limits.inflight != self.policy.inflight(limits.num_stages)
        if change.layers is not None:
            cost = repartition(cost, partition(sum(change.layers), len(change.layers), change.layers))
        ahead = limits.issues_ahead and len(cost.stages) == 1 and change.inflight is None
        pages = self._pages(change, cost)
        limits = replace(limits, num_stages=len(cost.stages), num_pages=pages, issues_ahead=ahead)
        if change.policy is not None:
            limits = replace(limits, chunk_size=policy.kind.default_chunk_size)
        if not chosen:
            limits = replace(limits, inflight=policy.inflight(limits.num_stages))
        names = ("chunk_size", "max_num_seqs", "inflight", "num_pages")
        given = {name: value for name in names if (value := getattr(change, name)) is not None}
        if limits.num_slots:
            given["num_slots"] = given.get("max_num_seqs", limits.num_slots)
        return policy, replace(limits, **given), cost

    def _pages(self, change: Change, cost: CostModel) -> int:
        """Return the number of KV pages after the change. Usually it is all that memory holds.

        If the largest stage gets more layers, or more sequences have states, memory holds fewer pages. If the run had
        exactly the pages that its seats could use, the result is no more than the seats after the change can use. The
        longest request fits in any case.
        """
        limits, pages = self.limits, self.max_pages
        seats = change.max_num_seqs or limits.max_num_seqs
        pages -= ceil(self.state_pages * (seats - limits.max_num_seqs))
        if self.pages_follow_layers:
            pages = pages * _most_layers(self.cost) // _most_layers(cost)
        of_a_seat = -(-limits.max_model_len // limits.page_size)
        if limits.num_pages == limits.max_num_seqs * of_a_seat:
            pages = min(pages, of_a_seat * seats)
        longest = max(request.prompt_tokens + request.output_tokens for request in self.requests)
        return max(pages, -(-longest // limits.page_size))

    def _with_hosts(self, cost: CostModel) -> CostModel:
        """Return the cost with the time of each stage's host, as if the stage computed longer by this time."""
        mean_s = sum(self.host_s) / len(self.host_s)
        hosts_s = self.host_s if len(cost.stages) == len(self.host_s) else (mean_s,) * len(cost.stages)
        stages = (replace(stage, a0=stage.a0 + host_s) for stage, host_s in zip(cost.stages, hosts_s, strict=True))
        return replace(cost, stages=tuple(stages))

    def _links(self, num_stages: int) -> Links:
        """Return the links of a pipeline with `num_stages` stages.

        With another number of stages than the run had, every link has the mean latency and rate of the run's links. It
        is unknown which of the new links would be slow.
        """
        if num_stages == len(self.links):
            return self.links
        forward = self.links[:-1] or self.links
        latency_s = fmean(link.latency_s for link in forward)
        s_per_token = fmean(link.token_bytes / link.bytes_per_s for link in forward)
        return (Link(latency_s, 1 / s_per_token if s_per_token else inf, token_bytes=1),) * num_stages

    def _requests(self, times: int) -> Iterator[Request]:
        """Yield the requests of the run, and repeat them with later arrivals, `times` times in all."""
        last_s = self.requests[-1].arrival_s
        period_s = last_s + last_s / max(1, len(self.requests) - 1)
        for time in range(times):
            for index, asked in enumerate(self.requests):
                sampling = SamplingParams(max_new_tokens=asked.output_tokens, ignore_eos=True, seed=0)
                number = time * len(self.requests) + index
                yield Request(number, (0,) * asked.prompt_tokens, sampling, time * period_s + asked.arrival_s)


def _were_computed(answered: Iterable[RequestFinished], timeline: Timeline) -> bool:
    """Return whether the trace has as many computed tokens as its answers need. A damaged trace may have fewer.

    A request needs its prompt tokens and its output tokens, except the last one, which no stage computes. The tokens
    that it found in the prefix cache were computed for another request.
    """
    left = sum(event.num_tokens for event in timeline.issued)
    for request in answered:
        left -= request.prompt_tokens - request.cached_tokens + request.output_tokens - 1
        if request.prompt_tokens < 1 or request.output_tokens < 1 or left < 0:
            return False
    return True


def _check_hits(answered: Iterable[RequestFinished]) -> None:
    """Raise CannotTry for requests that were preempted in a run with hits in the prefix cache.

    A trace does not hold the tokens that they found when they started again.
    """
    preemptions = sum(request.preemptions for request in answered)
    cached_tokens = sum(request.cached_tokens for request in answered)
    if preemptions and cached_tokens:
        raise CannotTry(
            f"the run preempted requests {preemptions:,} times and found {cached_tokens:,} tokens in the prefix cache. "
            f"The simulator repeats only one of the two; try a run with --prefix-cache off, or with more KV pages"
        )


def _sample(timeline: Timeline, count: int, seats: int) -> tuple[int, int]:
    """Return the number of requests to simulate, and the number of their answers after which times are taken.

    Args:
        seats: the most seats of a trial.

    Raises:
        CannotTry: too few requests can be simulated.
    """
    stages, chunks = len(timeline.stages), sum(event.decodes + event.num_chunks for event in timeline.issued)
    affordable = count * _MOST_STEPS / (len(timeline.issued) * stages + chunks / _CHUNKS_A_STEP)
    needed = min(count, max(round(affordable), ceil(_LEAST_SEATFULS * seats)))
    if needed > max(1.0, _MOST_OVER * affordable):
        raise CannotTry(f"{needed} of its requests must be simulated, but only {_MOST_OVER * affordable:.0f} can be")
    return needed, count if needed == count else needed - seats


def _most_layers(cost: CostModel) -> int:
    return max(end - first for first, end in (stage.layers for stage in cost.stages))


def _asked(answered: Iterable[RequestFinished], seats: float) -> Iterator[_Asked]:
    """Yield the requests in order of arrival, with times from the first arrival on.

    A run reads its input file at most `seats` requests ahead. If that many waited when a request was read, it was in
    the file before, and its recorded arrival is too late. Its arrival is then that of the request before it.

    Args:
        seats: infinite if the recorded arrivals are right.
    """
    first_s = arrival_s = -inf
    issues_s: list[float] = []  # of all requests that have arrived, sorted
    for request in answered:
        num_waiting = len(issues_s) - bisect_right(issues_s, request.arrived_s)
        if num_waiting < seats:
            arrival_s = max(arrival_s, request.arrived_s)
        first_s = arrival_s if first_s == -inf else first_s
        insort(issues_s, inf if request.first_issue_s is None else request.first_issue_s)
        yield _Asked(request.prompt_tokens, request.output_tokens, arrival_s - first_s, request.cached_tokens)


class _Enough(Exception):
    """The signal to end a simulation, because its times are known or it takes too many steps."""


class _Watch:
    """A recorder of a simulation's times. It ends the simulation after a number of answers, or after too many steps."""

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
