"""The real coordinator on a virtual clock.

Does what the engine does, in the same order: rank 0 takes in arrivals and results whenever its own stage is
free, issues a microbatch, and runs it through that stage before it looks again. What happened is told as the
events of a real run, so every report works on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from sarathi_pp.core.coordinator import Coordinator, IdleReason
from sarathi_pp.core.cost import CostModel
from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy.view import Limits, Policy
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.sim.pipeline import VirtualPipeline
from sarathi_pp.trace.events import Compute, Event, Issued, RequestArrived, Returned, Starved
from sarathi_pp.trace.request import TokenTimes

# Told with the stage that an event belongs to.
Record = Callable[[int, Event], None]


class Simulation:
    """One run of finitely many requests. Holds what is in flight and nothing of what is done.

    cost: what policies may know of the stages; the pipeline's own times may differ from it.
    """

    def __init__(
        self, limits: Limits, policy: Policy, pipeline: VirtualPipeline, record: Record, cost: CostModel | None = None
    ) -> None:
        self._now_s = 0.0
        self._coordinator = Coordinator(
            limits, policy, stop_rule=self._token_came, clock=lambda: self._now_s, cost=cost
        )
        self._pipeline = pipeline
        self._record = record
        self._live: dict[int, TokenTimes] = {}
        self._results: deque[tuple[float, StepResult]] = deque()
        self._starved: IdleReason | None = None
        self._token_s = 0.0

    def run(self, requests: Iterable[Request]) -> None:
        """Answer all requests, which come in order of arrival."""
        arrivals = _Arrivals(iter(requests))
        while True:
            self._admit(arrivals)
            self._collect()
            if self._issue():
                self._now_s = max(self._now_s, self._pipeline.entry_free_s)
            elif self._results:
                self._wait(arrivals)
            elif arrivals.next_s is None:
                assert not self._coordinator.unfinished, f"stuck: {self._coordinator.idle_reason}"
                return
            else:
                assert not self._coordinator.unfinished, f"stuck: {self._coordinator.idle_reason}"
                self._now_s = max(self._now_s, arrivals.next_s)

    def _wait(self, arrivals: _Arrivals) -> None:
        """Until the next result, or the next arrival where one could be issued."""
        until_s = self._results[0][0]
        if self._coordinator.idle_reason != "full" and arrivals.next_s is not None and self._room() > 0:
            until_s = min(until_s, arrivals.next_s)
        self._now_s = max(self._now_s, until_s)

    def _room(self) -> int:
        return self._coordinator.limits.max_num_seqs - self._coordinator.num_waiting

    def _admit(self, arrivals: _Arrivals) -> None:
        while self._room() > 0 and (request := arrivals.take(self._now_s)) is not None:
            self._record(0, RequestArrived(request.index, request.arrival_s, len(request.prompt_token_ids)))
            self._live[request.index] = TokenTimes()
            answered = self._coordinator.submit(request)
            if answered is not None:
                self._finish(answered, self._now_s)

    def _collect(self) -> None:
        while self._results and self._results[0][0] <= self._now_s:
            self._token_s, result = self._results.popleft()
            self._record(0, Returned(result.index, self._token_s))
            for completion in self._coordinator.complete(result):
                self._finish(completion, self._token_s)

    def _issue(self) -> bool:
        microbatch = self._coordinator.next_microbatch()
        if microbatch is None:
            if self._starved != self._coordinator.idle_reason:
                self._starved = self._coordinator.idle_reason
                self._record(0, Starved(self._now_s, self._starved))
            return False
        self._starved = None
        pool = self._coordinator.pool
        held = self._coordinator.held_tokens
        self._record(0, Issued.of(microbatch, pages_used=pool.num_pages - pool.num_free, tokens_held=held))
        for chunk in microbatch.chunks:
            if chunk.start == 0:
                self._live[chunk.sequence].issued(self._now_s)
        self._run(microbatch)
        return True

    def _run(self, microbatch: MicroBatch) -> None:
        spans, result_s = self._pipeline.run(microbatch)
        for stage, span in enumerate(spans):
            event = Compute(microbatch.index, microbatch.issued_s, span.arrived_s, span.start_s, span.end_s)
            self._record(stage, event)
        times = tuple(StageTime(microbatch.index, span.end_s - span.start_s) for span in spans)
        self._results.append((result_s, StepResult(microbatch.index, _draw(microbatch.chunks), times)))

    def _token_came(self, request: Request, token_id: int) -> bool:
        self._live[request.index].token_came(self._token_s)
        return False

    def _finish(self, completion: Completion, at_s: float) -> None:
        self._record(0, self._live.pop(completion.request.index).finished(completion, at_s))


def _draw(chunks: tuple[Chunk, ...]) -> tuple[SampledToken, ...]:
    """Tokens of no meaning: nothing reads them, and no output ends before its length."""
    return tuple(SampledToken(chunk.sequence, chunk.epoch, 0) for chunk in chunks if chunk.sampling is not None)


class _Arrivals:
    """Requests one ahead, so that the next arrival is known."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next = next(requests, None)

    @property
    def next_s(self) -> float | None:
        return None if self._next is None else self._next.arrival_s

    def take(self, now_s: float) -> Request | None:
        """The next request, if it has arrived."""
        request = self._next
        if request is None or request.arrival_s > now_s:
            return None
        self._next = next(self._requests, None)
        assert self._next is None or self._next.arrival_s >= request.arrival_s, "requests come in order of arrival"
        return request
