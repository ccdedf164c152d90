"""Heads that the first stage computes for the last one: the same tokens, and correct reports and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.plan import MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.engine.engine import Engine
from sarathi_pp.errors import ProtocolError
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.trace.events import Compute, Head, Returned
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import Frame, HeadFrame, MicroBatchFrame
from tests.analysis.schedules import start
from tests.commands.processes import COMMAND, ROOT, Files, run
from tests.engine.pipeline import ListRecorder, ListSink, ListSource, run_pipeline

ADDER = ROOT / "examples" / "tiny-adder"
SPLIT = "2,3"
PROMPTS = [tuple(3 + index % 9 for index in range(length)) for length in (3, 30, 11, 25, 8, 19)]


@pytest.mark.parametrize("sampling", [None, SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.9, seed=5)])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_same_tokens_wherever_the_head_is(stages: int, sampling: SamplingParams | None) -> None:
    params = [sampling] * len(PROMPTS) if sampling is not None else None
    moved, kept = (
        run_pipeline(ADDER, PROMPTS, stages=stages, policy="balanced", sampling=params, moves_head=moves)
        for moves in (True, False)
    )
    assert moved.tokens == kept.tokens and moved.reasons == kept.reasons
    heads = [event for event in moved.events[0] if isinstance(event, Head)]
    computes = {event.microbatch: event for event in moved.events[-1] if isinstance(event, Compute)}
    returned = {event.microbatch: event.at_s for event in moved.events[0] if isinstance(event, Returned)}
    assert 0.3 * len(computes) < len(heads) <= 0.5 * len(computes)
    for head in heads:
        assert computes[head.microbatch].end_s <= head.arrived_s <= head.start_s < head.end_s
        assert returned[head.microbatch] == head.end_s
    assert not any(isinstance(event, Head) for trace in (*moved.events[1:], *kept.events) for event in trace)


class OneStage:
    """The first of two stages: its layers take a second and its head takes half a second."""

    counts_cpu = True
    bytes_read = 0
    steps = 0
    graphed = None

    def __init__(self, clock: ManualClock, failure: Failure = Failure.NONE) -> None:
        self.clock = clock
        self.failure = failure

    def prepare(self, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        def compute(hidden: Tensor | None) -> StageOutput:
            self.clock.sleep(1.0)
            return StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))

        return compute

    def prepare_head(self, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        def compute(hidden: Tensor | None) -> StageOutput:
            assert hidden is not None
            self.clock.sleep(0.5)
            return StageOutput(tokens=(SampledToken(microbatch.chunks[0].sequence, 0, 9, failure=self.failure),))

        return compute

    def warm_up(self, num_tokens: int, num_keys: int) -> None: ...


class Answering(QueueChannel[Tensor]):
    """A pipeline that gives the last stage's answer to each microbatch."""

    def __init__(self, clock: ManualClock, answer: Callable[[MicroBatchFrame], Frame], rows: int = 1) -> None:
        super().__init__(clock, 9)
        self.answer = answer
        self.rows = rows
        self.microbatches: list[MicroBatch] = []

    def send(self, frame: Frame, payload: Tensor | None = None) -> None:
        if isinstance(frame, MicroBatchFrame):
            self.microbatches.append(frame.microbatch)
            frame, payload = self.answer(frame), torch.zeros(self.rows, 1)
        super().send(frame, payload)


def times(frame: MicroBatchFrame) -> tuple[StageTime, ...]:
    return (*frame.stage_times, StageTime(frame.microbatch.index, 2.0))


def left(frame: MicroBatchFrame) -> HeadFrame:
    return HeadFrame(frame.microbatch.index, 1, times(frame))


def drive(
    answer: Callable[[MicroBatchFrame], Frame],
    failure: Failure = Failure.NONE,
    debug_nan: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[ListSink, ListRecorder, Answering]:
    """Run one request of one token, with a last stage that has far more to do."""
    clock = ManualClock()
    recorder, sink = ListRecorder(), ListSink()
    channel = Answering(clock, answer)
    costs = (StageCost((0, 1), 1.0, 0.0, 0.0, 0.0, 0.0), StageCost((1, 3), 2.0, 0.0, 0.0, 0.0, 0.0, head_s=0.5))
    stage = OneStage(clock, failure)
    runner = StageRunner(stage, channel, recorder, clock, HostTimer(clock), debug_nan=debug_nan)
    engine = Engine(
        Limits(2, 16, 4, 64, 4, 64, 2),
        make_policy("sarathi"),
        runner,
        channel,
        recorder,
        clock,
        eos_token_ids=(),
        stop_checkers=lambda stop: None,
        heads=HeadPlacement(CostModel(1, costs)),
        listener=Mock(warn=warn),
    )
    request = Request(0, (1, 2, 3), SamplingParams(max_new_tokens=1, seed=0), 0.0)
    engine.run(ListSource([Row(1, 0, "own", request)]), sink)
    return sink, recorder, channel


def test_a_head_is_a_span_of_the_first_stage_and_a_result_like_any_other() -> None:
    sink, recorder, channel = drive(left)
    assert [microbatch.head_on_first for microbatch in channel.microbatches] == [True]
    assert sink.completions[0].token_ids == (9,)
    (head,) = (event for event in recorder.events if isinstance(event, Head))
    assert (head.microbatch, head.end_s - head.start_s) == (0, 0.5)
    (returned,) = (event for event in recorder.events if isinstance(event, Returned))
    assert returned.at_s == head.end_s


@pytest.mark.parametrize(
    "answer, what",
    [
        (lambda frame: HeadFrame(1, 1, times(frame)), "rows of microbatch 1 came .* which waits for m0"),
        (lambda frame: HeadFrame(0, 2, times(frame)), "2 rows came for the LM head of microbatch 0, which draws 1"),
        (lambda frame: HeadFrame(0, 0, times(frame)), "0 rows came for the LM head of microbatch 0, which draws 1"),
        (lambda frame: HeadFrame(0, 1, frame.stage_times), "microbatch 0 has times of 1 stages; the pipeline has 2"),
        (
            lambda frame: StepResult(0, (), times(frame)),
            "tokens of microbatch 0, although its LM head belongs to the first stage",
        ),
    ],
)
def test_another_head_than_the_one_that_is_due_is_refused(
    answer: Callable[[MicroBatchFrame], Frame], what: str
) -> None:
    with pytest.raises(ProtocolError, match=what):
        drive(answer)


@pytest.mark.parametrize("bad, stage", [((), 1), (((0, 0),), 0)])
def test_what_is_not_finite_begins_at_the_last_stage_where_none_before_has_noticed(
    bad: tuple[tuple[int, int], ...], stage: int
) -> None:
    sink, _, _ = drive(
        lambda frame: HeadFrame(frame.microbatch.index, 1, times(frame), bad),
        failure=Failure.NOT_FINITE,
        debug_nan=True,
    )
    assert f"stage {stage} was the first" in sink.errors[0].message


def test_a_head_without_memory_is_computed_at_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    prepare = OneStage.prepare_head

    def failing(self: OneStage, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        def compute(hidden: Tensor | None) -> StageOutput:
            attempts.append(microbatch.index)
            if len(attempts) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return prepare(self, microbatch)(hidden)

        return compute

    monkeypatch.setattr(OneStage, "prepare_head", failing)
    warned: list[str] = []
    sink, _, _ = drive(left, warn=warned.append)
    assert attempts == [0, 0] and sink.completions[0].token_ids == (9,)
    assert "no memory for microbatch 0 at first" in warned[0]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("head, some", [("auto", True), pytest.param("last", False, marks=pytest.mark.full)])
def test_processes_move_heads_unless_told_not_to(head: str, some: bool, tmp_path: Path) -> None:
    """The traces add up, and the answers are those of one stage, which moves none."""
    files, alone = Files(tmp_path / "two"), Files(tmp_path / "one")
    # The last stage has the most layers, and so a good reason to give its heads away.
    for these, options in ((files, ("--stages", "2", "--layer-split", SPLIT, "--head", head)), (alone, ())):
        these.input.parent.mkdir(exist_ok=True)
        these.write_prompts(PROMPTS, max_new_tokens=12, ignore_eos=True)
        where = ("--model", str(ADDER), "--input", str(these.input), "--output", str(these.output))
        run((*COMMAND, "generate", *where, *options, "--device", "cpu", "--quiet"), tmp_path, timeout_s=90)
    assert [row["token_ids"] for row in files.rows()] == [row["token_ids"] for row in alone.rows()]
    report = files.report()
    lines = [json.loads(line) for line in files.traces()[0].read_text().splitlines()]
    assert any(line["e"] == "head" for line in lines) == some
    assert all(stage["closing_error"] < 1e-6 for stage in report["per_stage"])
    run_facts = json.loads((files.output.parent / f"{files.output.name}.run" / "run.json").read_text())
    assert run_facts["moves_head"] == some


def test_traces_of_moved_heads_fold() -> None:
    """Compute and idle states of both stages fill the window, heads included."""
    outcome = run_pipeline(ADDER, PROMPTS, stages=2, policy="balanced")
    timeline = Timeline.read([[start(stage, 2), *events] for stage, events in enumerate(outcome.events)])
    timeline.check_order()
    heads_s = sum(timeline.stages[0].heads.seconds().values())
    first = measure_bubbles(timeline).stages[0]
    spans_s = sum(end - begin for begin, end in zip(timeline.stages[0].starts, timeline.stages[0].ends, strict=True))
    assert heads_s > 0 and first.compute_s == pytest.approx(spans_s + heads_s, abs=1e-6)
    assert first.closing_error < 1e-9
