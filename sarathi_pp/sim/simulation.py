"""The real coordinator on a virtual clock.

The simulation does what the engine of a real run does on rank 0, in the same order. Rank 0 computes the first stage,
and a step starts when this stage is free. Rank 0 then takes in new requests and results. If a result needs an LM head
on the first stage, it computes that. Otherwise it issues a microbatch and computes the first stage of it.
Everything that happens is recorded as the events of a real run, so every report works on it.

The caller makes the simulation advance step by step, so several simulations can share one clock (sim/replicas.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.plan import Chunk, IdleReason, MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy.view import Limits, Policy
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.sim.arrivals import Arrivals, InOrder
from sarathi_pp.sim.fixed_hits import FixedHits
from sarathi_pp.sim.pipeline import VirtualPipeline
from sarathi_pp.trace.events import Compute, Event, Head, Issued, RequestArrived, Returned, Starved
from sarathi_pp.trace.token_times import TokenTimes

# A function that takes the index of a stage and an event of that stage.
Record = Callable[[int, Event], None]


class Simulation:
    """One simulated run. It keeps only unfinished requests and microbatches in memory.

    Args:
        pipeline: gives the times of stages and links.
        record: is called with each event.
        cost: cost model for the policy. The pipeline's own times may differ from it. None: the policy uses no costs.
        heads: chooses the stage of each LM head. None: always the last stage.
        hits: see FixedHits. None: requests find the pages that the limits' mode of the prefix cache allows.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        pipeline: VirtualPipeline,
        record: Record,
        cost: CostModel | None = None,
        heads: HeadPlacement | None = None,
        hits: Sequence[int] | None = None,
    ) -> None:
        self._now_s = 0.0
        self._coordinator = Coordinator(
            limits, policy, stop_rule=self._token_came, clock=lambda: self._now_s, cost=cost, heads=heads
        )
        if hits is not None:
            self._coordinator.prefixes = FixedHits(self._coordinator.pool, hits)
        self._pipeline = pipeline
        self._record = record
        self._live: dict[int, TokenTimes] = {}
        self._results: deque[tuple[float, StepResult, MicroBatch]] = deque()
        self._head: _Head | None = None
        self._starved: IdleReason | None = None
        self._token_s = 0.0
        self._runs = True  # the last step made the first stage compute, or there was no step yet

    def run(self, requests: Iterable[Request]) -> None:
        """Answer all requests. They must come in order of arrival."""
        arrivals = InOrder(iter(requests))
        while (at_s := self.due_s(arrivals)) < inf:
            self.step(at_s, arrivals)

    def due_s(self, arrivals: Arrivals) -> float:
        """Return the time of the next step, in seconds on the virtual clock.

        If the first stage computes, it is the time when that ends. Otherwise it is the next result, or the next arrival
        if it can be issued. It is infinite if every request is answered and no more come.
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
        """Make one step at `at_s`, which must be the time that `due_s` returned."""
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
        """Take in the results that have come. Return True if the first stage now computes the LM head for one."""
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
        self._record(0, Issued.of(microbatch, self._coordinator.take_kv_use()))
        for chunk in microbatch.chunks:
            if not chunk.decode:
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
    """An LM head that the first stage computes, with the result to which it leads."""

    result: StepResult
    start_s: float
    end_s: float


def _draw(chunks: tuple[Chunk, ...]) -> tuple[SampledToken, ...]:
    """Return a token with id 0 for each chunk that draws one. No code reads the ids: outputs end by length only."""
    return tuple(SampledToken(chunk.sequence, chunk.epoch, 0) for chunk in chunks if chunk.sampling is not None)
