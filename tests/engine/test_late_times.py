"""A device that reports its times late, as a GPU does: nothing waits for it, and no time is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View
from sarathi_pp.core.request import Request
from sarathi_pp.errors import PeerLostError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.clock import Clock, ManualClock
from sarathi_pp.trace.events import Compute, Issued
from sarathi_pp.trace.timer import Instant
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import Frame, MicroBatchFrame
from tests.commands.processes import ROOT
from tests.engine.pipeline import ListRecorder, run_pipeline

ADDER = ROOT / "examples" / "tiny-adder"
PROMPTS = [tuple(3 + index % 9 for index in range(length)) for length in (3, 30, 11, 25, 8, 19)]
STAGES = 3
COST = CostModel(1, tuple(StageCost((s, s + 1), a0=1e-3, a1=1e-4, a2=0.0, a3=0.0, a4=0.0) for s in range(STAGES)))


@dataclass
class LateTimer:
    """A timer that reports a point after `behind` later marks, or after a wait for that point."""

    clock: Clock
    behind: int
    marks: list[LateMark] = field(default_factory=list)

    def mark(self) -> LateMark:
        self.clock.sleep(0.001)
        self.marks.append(LateMark(self, len(self.marks), self.clock.now()))
        return self.marks[-1]


@dataclass
class LateMark:
    timer: LateTimer
    index: int
    passed_s: float
    waited: bool = False

    @property
    def told(self) -> bool:
        return self.waited or len(self.timer.marks) > self.index + self.timer.behind

    def at_s(self) -> float | None:
        return self.passed_s if self.told else None

    def wait(self) -> None:
        for mark in self.timer.marks[: self.index + 1]:
            mark.waited = True


class Answers:
    """A stage that passes on zeros, or answers without a token."""

    counts_cpu = True
    bytes_read = 0
    steps = 0

    def __init__(self, *, last: bool) -> None:
        self.last = last

    def prepare(self, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        output = StageOutput() if self.last else StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))
        return lambda hidden: output

    def prepare_head(self, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        raise AssertionError("heads are not moved where times come late")

    def warm_up(self, num_tokens: int, num_keys: int) -> None: ...


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("behind", [0, 1, 2, 5])
def test_each_span_is_recorded_told_and_its_buffer_given_back_when_the_device_has_ended_it(
    behind: int, last: bool
) -> None:
    clock = ManualClock()
    edge: QueueChannel[Tensor] = QueueChannel(clock, 100)
    recorder = ListRecorder()
    timer = LateTimer(clock, behind)
    runner = StageRunner(Answers(last=last), edge, recorder, clock, timer)
    released: list[int] = []
    for index in range(20):
        clock.sleep(0.25)
        microbatch = MicroBatch(index, (Chunk(0, 0, 3 * index, 3, False, (1, 2, 3), (), None),), (), clock.now())

        def release(index: int = index) -> None:
            assert timer.marks[2 * index + 1].told, f"the device may still read the input of {index}"
            released.append(index)

        runner.run(MicroBatchFrame(microbatch), None, Instant(clock.now()), release)
    assert last or behind < 2 or len(released) < 20
    runner.close()
    assert released == list(range(20))
    spans = {event.microbatch: event for event in recorder.events if isinstance(event, Compute)}
    assert list(spans) == released
    told: list[StageTime] = []
    for index in range(20):
        frame = edge.receive(0).frame
        (time,) = frame.stage_times
        assert index - behind <= time.microbatch <= index
        if time.seconds:
            told.append(time)
            span = spans[time.microbatch]
            assert time.seconds == span.end_s - span.start_s
    assert [time.microbatch for time in told] == list(range(len(told)))
    assert len(told) >= 20 - behind
    if last or behind == 0:
        assert len(told) == 20, "a result waits for the device, which then tells at once"


class WaitingChannel(QueueChannel[Tensor]):
    """A channel that copies the device's results, like a wire through host memory: after a send, the device is done."""

    timer: LateTimer

    def send(self, frame: Frame, payload: Tensor | None = None) -> None:
        self.timer.marks[-1].wait()
        super().send(frame, payload)


def test_where_sending_waits_for_the_device_a_span_is_settled_at_once() -> None:
    clock = ManualClock()
    edge = WaitingChannel(clock, 100)
    edge.timer = LateTimer(clock, behind=5)
    recorder = ListRecorder()
    runner = StageRunner(Answers(last=False), edge, recorder, clock, edge.timer)
    for index in range(4):
        chunk = Chunk(0, 0, 3 * index, 3, False, (1, 2, 3), (), None)
        runner.run(MicroBatchFrame(MicroBatch(index, (chunk,), (), clock.now())), None, Instant(clock.now()))
        assert [event.microbatch for event in recorder.events] == list(range(index + 1))


class LostChannel(QueueChannel[Tensor]):
    """A channel whose peer is lost."""

    def reserve(self) -> None:
        raise PeerLostError("rank 1 is lost")


def test_what_was_computed_is_in_the_trace_though_nobody_takes_it() -> None:
    clock, recorder, released = ManualClock(), ListRecorder(), []
    runner = StageRunner(Answers(last=False), LostChannel(clock, 1), recorder, clock, LateTimer(clock, behind=0))
    frame = MicroBatchFrame(MicroBatch(0, (Chunk(0, 0, 0, 3, False, (1, 2, 3), (), None),), (), clock.now()))
    with pytest.raises(PeerLostError):
        runner.run(frame, None, Instant(clock.now()), lambda: released.append(0))
    assert [event.microbatch for event in recorder.events] == released == [0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inflight", [STAGES, STAGES + 1])
def test_a_run_whose_device_is_as_late_as_can_be_ends_with_every_span_and_the_same_tokens(inflight: int) -> None:
    """Each microbatch has two marks, so a device is at most the microbatches in flight behind."""
    here, late = (
        run_pipeline(
            Path(ADDER), PROMPTS, stages=STAGES, inflight=inflight, policy="balanced", cost=COST, new_timer=new_timer,
        )
        for new_timer in (LateTimerOf(0), LateTimerOf(2 * inflight))
    )  # fmt: skip
    assert late.tokens == here.tokens
    issued = [event.microbatch for event in late.events[0] if isinstance(event, Issued)]
    for trace in late.events:
        spans = [event for event in trace if isinstance(event, Compute)]
        assert [span.microbatch for span in spans] == issued
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        assert all(span.arrived_s <= span.start_s <= span.end_s for span in spans)


@dataclass(frozen=True)
class LateTimerOf:
    behind: int

    def __call__(self, clock: Clock) -> LateTimer:
        return LateTimer(clock, self.behind)


class WatchingPolicy(Policy):
    """A policy that keeps the stage costs that it receives."""

    def __init__(self) -> None:
        self.cost: CostModel | None = None
        self._inner = Sarathi()

    def pick(self, view: View) -> list[Grant]:
        self.cost = view.cost
        return self._inner.pick(view)

    def max_tokens(self, limits: Limits) -> int:
        return self._inner.max_tokens(limits)


@pytest.mark.parametrize("late", [0, 1, STAGES])
def test_times_told_late_teach_the_cost_of_the_microbatch_they_are_of(late: int) -> None:
    """Microbatches of very different sizes report 1 ms per token on stage 0, 2 ms on stage 1, ..."""
    policy = WatchingPolicy()
    coordinator = Coordinator(Limits(STAGES, 64, 64, 512, 4, 4096, STAGES), policy, cost=COST)
    issued: list[MicroBatch] = []
    for index in range(400):
        length = (7, 64, 23, 40)[index % 4]
        coordinator.submit(Request(index, (1,) * length, SamplingParams(max_new_tokens=1, seed=0)))
        microbatch = coordinator.next_microbatch()
        assert microbatch is not None
        issued.append(microbatch)
        if coordinator.num_inflight == STAGES:
            oldest = index - STAGES + 1
            told = oldest - late
            times = (
                tuple(StageTime(told, 1e-3 * (stage + 1) * issued[told].num_tokens) for stage in range(STAGES))
                if told >= 0
                else (StageTime(oldest, 0.0),) * STAGES
            )
            drawn = [chunk for chunk in issued[oldest].chunks if chunk.sampling is not None]
            tokens = tuple(SampledToken(chunk.sequence, chunk.epoch, 7) for chunk in drawn)
            coordinator.complete(StepResult(oldest, tokens, times))
    assert policy.cost is not None
    for microbatch, stage in itertools.product(issued[-4:], range(STAGES)):
        true_s = 1e-3 * (stage + 1) * microbatch.num_tokens
        assert policy.cost.seconds(stage, Load.of(microbatch)) == pytest.approx(true_s, rel=0.15)
