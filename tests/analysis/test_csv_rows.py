from __future__ import annotations

import csv
from io import StringIO

import pytest
from hypothesis import given

from sarathi_pp.analysis.csv_rows import COLUMNS, run_begin, stage_rows, write_csv
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.trace.events import Compute, Event, Head, Issued, Returned
from tests.analysis.schedules import Schedule, constant, start
from tests.analysis.strategies import schedules


def read_back(timeline: Timeline) -> list[dict[str, str]]:
    file = StringIO(newline="")
    write_csv(timeline, file)
    file.seek(0)
    return list(csv.DictReader(file))


@given(schedules())
def test_every_span_comes_back(schedule: Schedule) -> None:
    timeline = Timeline.read(schedule.events())
    begin = timeline.window[0]
    rows = iter(read_back(timeline))
    for number, stage in enumerate(timeline.stages):
        previous_end: float | None = None
        for position, microbatch in enumerate(stage.microbatches):
            row = next(rows)
            assert (int(row["microbatch"]), int(row["stage"])) == (microbatch, number)
            begun, ended = stage.starts[position], stage.ends[position]
            assert float(row["issued_s"]) == stage.issued[position] - begin
            assert float(row["arrived_s"]) == stage.arrived[position] - begin
            assert float(row["start_s"]) == begun - begin
            assert float(row["end_s"]) == ended - begin
            assert float(row["compute_s"]) == ended - begun
            assert row["gap_s"] == "" if previous_end is None else float(row["gap_s"]) == begun - previous_end
            previous_end = ended
    assert next(rows, None) is None


def test_the_lines_themselves() -> None:
    events: list[Event] = [
        start(0, 1),
        Issued(0, 100.5, "m0[s0:0+8 s1:0+4]", 12, 0, 0, 40.0, 2, 12),
        Issued(1, 100.75, "m1[d s0:8 s1:4]", 0, 2, 14, 0.0, 2, 14),
        Compute(0, 100.5, 100.5, 100.625, 101.0),
        Returned(0, 101.0),
        Compute(1, 100.75, 100.75, 101.25, 101.3),
    ]
    file = StringIO(newline="")
    write_csv(Timeline.read([events]), file)
    assert file.getvalue().splitlines() == [
        "microbatch,stage,issued_s,arrived_s,start_s,end_s,compute_s,gap_s,prefill_tokens,decodes,decode_context,text",
        "0,0,0.000000000,0.000000000,0.125000000,0.500000000,0.375000000,,12,0,0,m0[s0:0+8 s1:0+4]",
        "1,0,0.250000000,0.250000000,0.750000000,0.800000000,0.050000000,0.250000000,0,2,14,m1[d s0:8 s1:4]",
    ]


def test_what_rank_0_did_not_record_is_empty() -> None:
    traces = Schedule(2, 2, constant(1.0)).events(complete=False)
    traces[0] = [event for event in traces[0] if getattr(event, "microbatch", 0) == 0]
    rows = read_back(Timeline.read(traces))
    assert [(row["stage"], row["microbatch"]) for row in rows] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert [rows[-1][name] for name in ("prefill_tokens", "decodes", "decode_context", "text")] == [""] * 4
    assert float(rows[-1]["start_s"]) == 2.0


@pytest.mark.parametrize("issues", [0, 1])
def test_times_begin_with_the_run_before_anything_came_back(issues: int) -> None:
    issued = [Issued(0, 7.0, "m0[s0:0+1]", 1, 0, 0, 0.5, 1, 1)]
    timeline = Timeline.read([[start(0, 1), *issued[:issues]]])
    assert run_begin(timeline) == 7.0 * issues
    assert read_back(timeline) == []


def test_lines_are_written_one_by_one() -> None:
    class Counting(StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    file = Counting(newline="")
    write_csv(Timeline.read(Schedule(50, 2, constant(1.0)).events()), file)
    assert file.writes == 101
    assert tuple(file.getvalue().split("\r\n")[0].split(",")) == COLUMNS


def test_a_head_has_a_line_of_its_own() -> None:
    traces = Schedule(2, 2, constant(1.0)).events()
    begin = next(event.at_s for event in traces[0] if isinstance(event, Issued))
    last = max(event.at_s for event in traces[0] if isinstance(event, Returned))
    traces[0].append(Head(1, last, last + 0.25, last + 0.75))
    lines = list(stage_rows(Timeline.read(traces)))
    (head,) = (line for line in lines if line[-1] == "head")
    at = [f"{instant - begin:.9f}" for instant in (last, last + 0.25, last + 0.75)]
    assert head == (1, 0, "", *at, "0.500000000", "", "", "", "", "head")
    assert [line[:2] for line in lines] == [(0, 0), (1, 0), (1, 0), (0, 1), (1, 1)]
