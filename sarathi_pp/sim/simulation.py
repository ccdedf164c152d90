"""The real coordinator on a virtual clock.

The simulation does what the engine does, in the same order. Whenever its own stage is free, rank 0 takes in arrivals
and results. It computes the LM heads that its stage has to compute. Then it issues a microbatch, and runs it through
its stage before the next step. Everything that happens is recorded as the events of a real run, so every report works
on it.

The simulation advances step by step, so that several can share a clock. See sim/replicas.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.plan import Chunk, IdleReason, MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy.view import Limits, Policy
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.sim.arrivals import Arrivals, InOrder
from sarathi_pp.sim.pipeline import VirtualPipeline
from sarathi_pp.trace.events import Compute, Event, Head, Issued, RequestArrived, Returned, Starved
from sarathi_pp.trace.token_times import TokenTimes

# Called with a stage and an event of that stage.
Record = Callable[[int, Event], None]


class Simulation:
    """One run of finitely many requests. It holds what is in flight, and nothing that is done.

    Args:
        cost: costs that policies may know. The pipeline's own times may differ from them.
        heads: chooses the LM heads that the first stage computes.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        pipeline: VirtualPipeline,
        record: Record,
        cost: CostModel | None = None,
        heads: HeadPlacement | None = None,
    ) -> None:
        self._now_s = 0.0
        self._coordinator = Coordinator(
            limits, policy, stop_rule=self._token_came, clock=lambda: self._now_s, cost=cost, heads=heads
        )
        self._pipeline = pipeline
        self._record = record
        self._live: dict[int, TokenTimes] = {}
        self._results: deque[tuple[float, StepResult, MicroBatch]] = deque()
        self._head: _Head | None = None
        self._starved: IdleReason | None = None
        self._token_s = 0.0
        self._runs = True  # the first stage computes, or there was no step yet

    def run(self, requests: Iterable[Request]) -> None:
        """Answer all requests. They must come in order of arrival."""
        arrivals = InOrder(iter(requests))
        while (at_s := self.due_s(arrivals)) < inf:
            self.step(at_s, arrivals)

    def due_s(self, arrivals: Arrivals) -> float:
        """Return the time of the next step: the first stage is free, a result is there, or an arrival could be issued.

        The time is infinite if everything that arrived is answered and nothing more comes.
        """
        if self._runs:
            until_s = self._pipeline.entry_free_s
        else:
            assert self._results or not self._coordinator.unfinished, f"stuck: {self._coordinator.idle_reason}"
            until_s = self._results[0][0] if self._results else inf
            if self._coordinator.idle_reason != "full" and self._room() > 0:
                until_s = min(until_s, arrivals.next_s)
        return max(self._now_s, until_s)

    def step(self, at_s: float, arrivals: Arrivals) -> None:
        """Make one step at the time when it is due."""
        self._now_s = at_s
        if self._head is None:  # the engine takes no arrivals between an LM head and the work after it
            self._admit(arrivals)
        self._runs = self._collect() or self._issue()

    def _room(self) -> int:
        return self._coordinator.limits.max_num_seqs - self._coordinator.num_waiting

    def _admit(self, arrivals: Arrivals) -> None:
        while self._room() > 0 and (request := arrivals.take(self._now_s)) is not None:
            self._record(0, RequestArrived(request.index, request.arrival_s, len(request.prompt_token_ids)))
            self._live[request.index] = TokenTimes()
            answered = self._coordinator.submit(request)
            if answered is not None:
                self._finish(answered, self._now_s)

    def _collect(self) -> bool:
        """Take in the results that are there. Return True if the first stage now computes an LM head."""
        if self._head is not None:
            head, self._head = self._head, None
            self._token_s = head.end_s
            self._complete(head.result, head.end_s - head.start_s)
        while self._results and self._results[0][0] <= self._now_s:
            arrived_s, result, microbatch = self._results.popleft()
            if microbatch.head_on_first:
                self._head = _Head(result, *self._pipeline.run_head(microbatch, self._now_s))
                self._record(0, Head(result.index, arrived_s, self._head.start_s, self._head.end_s))
                return True
            self._token_s = max(self._token_s, arrived_s)
            self._complete(result, 0.0)
        return False

    def _complete(self, result: StepResult, head_s: float) -> None:
        self._record(0, Returned(result.index, self._token_s))
        for completion in self._coordinator.complete(result, head_s):
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
        self._results.append((result_s, StepResult(microbatch.index, _draw(microbatch.chunks), times), microbatch))

    def _token_came(self, request: Request, token_id: int) -> bool:
        self._live[request.index].token_came(self._token_s)
        return False

    def _finish(self, completion: Completion, at_s: float) -> None:
        self._record(0, self._live.pop(completion.request.index).finished(completion, at_s))


class _Head(NamedTuple):
    """An LM head that the first stage computes."""

    result: StepResult
    start_s: float
    end_s: float


def _draw(chunks: tuple[Chunk, ...]) -> tuple[SampledToken, ...]:
    """Return arbitrary tokens. Nothing reads them, and outputs end by their length only."""
    return tuple(SampledToken(chunk.sequence, chunk.epoch, 0) for chunk in chunks if chunk.sampling is not None)
