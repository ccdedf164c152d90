"""Memory, trace and queues do not grow with the number of rows after a run has started."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sarathi_pp.analysis.summary import summarise
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.engine.engine import Engine
from sarathi_pp.engine.progress import Progress
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.source import FileSource
from sarathi_pp.outputs.journal import Journal
from sarathi_pp.outputs.sink import FileSink
from sarathi_pp.stages.emulated_stage import EmulatedStage
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.events import TraceEnd
from sarathi_pp.trace.recorder import MOST_WAITING, Recorder
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire.channel import QueueChannel
from tests.analysis.schedules import start
from tests.core.cost.test_profile import PROFILE

SEATS, PAGES, VOCAB = 64, 256, 1000
# Reached within the first rows.
TRACE_BYTES = 2**17
PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def traced_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


@dataclass
class Sampler:
    """Samples of all sizes, taken after each tenth of the rows."""

    measure: Any
    trace: Path
    num_rows: int
    recorder: Any = None
    memory: list[int] = field(default_factory=list)
    trace_bytes: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def sample(self, progress: Progress) -> None:
        if progress.requests_done >= (len(self.memory) + 1) * self.num_rows // 10:
            self.memory.append(self.measure())
            self.trace_bytes.append(self.trace.stat().st_size)
            self.waiting.append(len(self.recorder._events))


def write_rows(path: Path, num_rows: int, *, named: bool) -> None:
    with path.open("w") as file:
        for row in range(num_rows):
            name = {"id": f"row {row}"} if named else {}
            file.write(json.dumps({**name, "prompt_token_ids": [1 + row % 7], "max_tokens": 2}) + "\n")


def answer(folder: Path, num_rows: int, measure: Any, *, named: bool) -> tuple[Sampler, dict[str, Any]]:
    """Run tiny rows on a stage that takes no time; return the samples and the report."""
    write_rows(folder / "in.jsonl", num_rows, named=named)
    clock, tokenizer = SystemClock(), Tokenizer(None, vocab_size=VOCAB)
    nothing = replace(PROFILE, num_layers=4, cost=CostModel(1, (StageCost((0, 4), 0, 0, 0, 0, 0),)))
    run: Any = SimpleNamespace(layers=[(0, 4)])
    stage: Any = EmulatedStage(nothing, run, (0, 4), torch.float32, clock)
    trace = folder / "trace.jsonl"
    sampler = Sampler(measure, trace, num_rows)
    with Recorder(trace, most_bytes=TRACE_BYTES) as recorder:
        sampler.recorder = recorder
        recorder.record(start(0, 1))
        edge: QueueChannel = QueueChannel(clock, 3)
        runner = StageRunner(stage, edge, recorder, clock, HostTimer(clock))
        engine = Engine(
            Limits(1, 256, SEATS, 512, 4, PAGES, 2), make_policy("sarathi"), runner, edge, recorder, clock,
            eos_token_ids=(), stop_checkers=lambda stop: None, listener=Mock(report_progress=sampler.sample),
        )  # fmt: skip
        journal = Journal.open(str(folder / "out.jsonl"))
        sink = FileSink(journal, tokenizer=tokenizer, clock=clock, model="m")
        maker = RequestMaker(tokenizer, GenerationDefaults(), PromptLimits(512, PAGES, 4, VOCAB), seed=0)
        source = FileSource(str(folder / "in.jsonl"), maker, clock=clock, capacity=2 * SEATS)
        engine.run(source, sink)
        sink.close()
        engine.close()
        recorder.record(TraceEnd(at_s=clock.now()))
    assert (sink.num_finished, sink.num_failed) == (num_rows, 0)
    return sampler, summarise([trace])


def check(sampler: Sampler, report: dict[str, Any], most_growth_bytes: int) -> None:
    print(f"memory {sampler.memory}, trace {sampler.trace_bytes}, waiting {sampler.waiting}")
    assert len(sampler.memory) >= 9, "the run was hardly looked at"
    begin, *later = sampler.memory[3:]
    assert max(later) - begin < most_growth_bytes
    assert max(sampler.trace_bytes) <= TRACE_BYTES + 100
    assert max(sampler.waiting) <= MOST_WAITING and max(sampler.waiting[3:]) == 0
    whole, num_rows = report["whole_run"], sampler.num_rows
    assert (whole["requests"], whole["completed"], whole["failed"]) == (num_rows, num_rows, 0)
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (num_rows, 2 * num_rows)
    assert 0 < report["completed"] < num_rows / 5 and report["closing_error"] < 0.01


@pytest.mark.parametrize("named", [pytest.param(False, marks=pytest.mark.full), True])
def test_nothing_grows_with_the_number_of_rows(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that an input names takes 16 bytes. Few rows in flight keep the other figures steady."""
    num_rows, on_their_way_bytes = 10_000, 300_000
    monkeypatch.setattr("sarathi_pp.outputs.sink._QUEUE_ROWS", SEATS)
    tracemalloc.start()
    try:
        sampler, report = answer(tmp_path, num_rows, traced_bytes, named=named)
    finally:
        tracemalloc.stop()
    check(sampler, report, on_their_way_bytes + (16 * num_rows if named else 0))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_nothing_grows_with_very_many_rows(tmp_path: Path) -> None:
    sampler, report = answer(tmp_path, 200_000, resident_bytes, named=False)
    check(sampler, report, 4 * 2**20)
