"""An engine after an exception at any of its calls: the next run answers as a fresh one does, or explains why not."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.engine.engine import Engine
from sarathi_pp.errors import PeerLostError
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.events import Compute, Issued, Returned
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import Goodbye
from tests.engine.fake_stages import PAGE_SIZE, FakeStage, expected, request_rows, serving
from tests.engine.pipeline import ListRecorder, ListSink
from tests.machine import patient

pytestmark = pytest.mark.timeout(120)

# The longest needs more than one chunk. All together exceed the pages, so that some are preempted.
PROMPTS = [tuple(range(10 * n, 10 * n + length)) for n, length in enumerate([3, 21, 9, 14, 1, 6])]
NEW_TOKENS = 7
NUM_PAGES = 13
CLOCK = SystemClock()
# If one of these has raised, the data left on the wire is unknown.
MAY_LOSE = {"results.receive", "edge.reserve", "edge.send", "stage clock.now", "stage recorder.record"}


class FaultError(Exception):
    """An error that the engine does not know."""


@dataclass
class Faults:
    """Faults that raise at a chosen call of the watched functions: by name and number of earlier calls."""

    at: tuple[str, int] | None = None
    after: bool = False
    calls: Counter[str] = field(default_factory=Counter)

    def watch(self, name: str, thing: Any, *methods: str) -> Any:
        for method in methods:
            setattr(thing, method, self.watched(f"{name}.{method}", getattr(thing, method)))
        return thing

    def watched(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            due = self.at == (name, self.calls[name])
            self.calls[name] += 1
            if due and not self.after:
                raise FaultError(name)
            returned = call(*args, **options)
            if due:
                raise FaultError(name)
            return returned

        return counted


class Clock:
    def now(self) -> float:
        return CLOCK.now()

    def thread_cpu(self) -> float:
        return 0.0


class Stop:
    """A stop checker that never stops."""

    def push(self, token_id: int) -> bool:
        return False


class Pipeline:
    """One or two stages and the engine, all watched."""

    def __init__(self, num_stages: int, faults: Faults) -> None:
        self.faults = faults
        inflight = num_stages + 1
        edges = [QueueChannel(CLOCK, inflight + 1) for _ in range(num_stages)]
        self.first_edge = edges[0]
        clock = faults.watch("stage clock", Clock(), "now")
        stage = faults.watch("stage", FakeStage(NUM_PAGES, last=num_stages == 1), "prepare")
        prepare = stage.prepare
        stage.prepare = lambda microbatch: faults.watched("stage.compute", prepare(microbatch))
        self.recorder = ListRecorder()
        first = StageRunner(
            stage,
            faults.watch("edge", Edge(edges[0]), "reserve", "send"),
            faults.watch("stage recorder", ListRecorder(self.recorder.events), "record"),
            clock,
            HostTimer(clock),
        )
        self.threads = []
        if num_stages == 2:
            last = StageRunner(
                FakeStage(NUM_PAGES, last=True), edges[1], ListRecorder(), CLOCK, HostTimer(CLOCK), index=1
            )
            self.threads.append(serving(last, edges[0]))
        chosen = make_policy("sarathi")
        policy: Any = SimpleNamespace(
            pick=faults.watched("policy.pick", chosen.pick), max_tokens=chosen.max_tokens, holds_sequences=True
        )
        self.engine = Engine(
            Limits(num_stages, 8, 4, 64, PAGE_SIZE, NUM_PAGES, inflight),
            policy,
            first,
            faults.watch("results", Edge(edges[-1]), "receive"),
            faults.watch("recorder", ListRecorder(self.recorder.events), "record"),
            faults.watch("clock", Clock(), "now"),
            eos_token_ids=(),
            stop_checkers=faults.watched("stop_checkers", lambda stop: faults.watch("stop", Stop(), "push")),
            listener=Mock(report_progress=faults.watched("on_progress", lambda progress: None)),
        )
        self.next_index = 0
        faults.calls.clear()

    def run(self) -> dict[int, tuple[int, ...]]:
        first = self.next_index
        self.next_index += len(PROMPTS)
        source = self.faults.watch(
            "source", Source(request_rows(first, PROMPTS, NEW_TOKENS, ("stop",))), "take", "wait", "is_exhausted"
        )
        sink = self.faults.watch("sink", ListSink(), "finish", "fail")
        self.engine.run(source, sink, Mock(asked=self.faults.watched("asked", lambda: None)))
        return {index - first: completion.token_ids for index, completion in sink.completions.items()}

    def close(self) -> None:
        if self.engine.is_lost:
            self.first_edge.send(Goodbye())
        else:
            self.engine.close()
        for thread in self.threads:
            thread.join(patient(20))
            assert not thread.is_alive()


class Edge:
    def __init__(self, channel: QueueChannel) -> None:
        self.reserve, self.send, self.receive, self.close = (
            channel.reserve,
            channel.send,
            channel.receive,
            channel.close,
        )


class Source(MemorySource):
    @property
    def exhausted(self) -> bool:
        return self.is_exhausted()

    def is_exhausted(self) -> bool:
        return super().exhausted


ANSWERS = {index: expected(prompt, NEW_TOKENS) for index, prompt in enumerate(PROMPTS)}


def indices(pipeline: Pipeline, kind: type) -> list[int]:
    return [event.microbatch for event in pipeline.recorder.events if isinstance(event, kind)]


@functools.cache
def calls_of_a_run(num_stages: int) -> Counter[str]:
    faults = Faults()
    pipeline = Pipeline(num_stages, faults)
    assert pipeline.run() == ANSWERS
    calls = faults.calls.copy()
    assert pipeline.engine._coordinator.num_preemptions, "pages are enough for all: the test proves less"
    pipeline.close()
    return calls


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_after_an_exception_at_any_call_the_next_run_answers_or_says_why(num_stages: int, after: bool) -> None:
    calls = calls_of_a_run(num_stages)
    recovered: set[str] = set()
    # The first calls of each kind, while others are in flight, are enough.
    for name, number in ((name, number) for name, count in calls.items() for number in range(min(count, 10))):
        faults = Faults(after=after)
        pipeline = Pipeline(num_stages, faults)
        faults.at = name, number
        try:
            with pytest.raises(FaultError):
                pipeline.run()
        except pytest.fail.Exception:
            continue  # with earlier results there were fewer such calls
        faults.at = None
        issued_before = pipeline.engine._coordinator.num_issued
        if pipeline.engine.is_lost:
            assert name in MAY_LOSE, f"{name} was raised at call {number}: nothing was lost by it"
            with pytest.raises(PeerLostError, match=f"lost in an earlier call .FaultError: {name}"):
                pipeline.run()
            assert pipeline.engine._coordinator.num_issued == issued_before
        else:
            for _ in range(2):
                assert pipeline.run() == ANSWERS, f"after {name} at call {number}"
            recovered.add(name)
            if "record" not in name:
                # The events of the trace are whole: a report can be made of them.
                count = pipeline.engine._coordinator.num_issued
                pipeline.engine._results.receive(0)
                for kind in (Issued, Returned, Compute):
                    assert indices(pipeline, kind) == list(range(count)), f"{kind.__name__}s after {name} at {number}"
        pipeline.close()
    assert recovered >= set(calls) - MAY_LOSE


def test_what_was_abandoned_is_not_computed_to_its_end() -> None:
    """The next run starts with pages and seats of its own, and no microbatch holds an earlier request."""
    faults = Faults()
    pipeline = Pipeline(2, faults)
    faults.at = "sink.finish", 0
    with pytest.raises(FaultError):
        pipeline.run()
    faults.at = None
    seen: list[int] = []
    pick = pipeline.engine._coordinator._policy.pick

    def watched(view: Any) -> Any:
        seen.extend(view.running)
        return pick(view)

    pipeline.engine._coordinator._policy.pick = watched
    assert pipeline.run() == ANSWERS
    assert min(seen) >= len(PROMPTS)
    pipeline.close()
