"""A run as lines for a spreadsheet: one per microbatch and stage, stage by stage, in order of start.

Times are seconds from the start of the run window on rank 0's clock, to the nanosecond. Some cells are empty: the gap
before a stage's first microbatch, and the last four columns if rank 0's trace was cut before the microbatch was issued.
An LM head that the first stage computed for the last one has a line of its own. Its text is `head`, and its cells about
the issue and the gap are empty.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from sarathi_pp.analysis.stage_states import gap_before
from sarathi_pp.analysis.timeline import StageTimeline, Timeline

COLUMNS = (
    "microbatch",
    "stage",
    "issued_s",
    "arrived_s",
    "start_s",
    "end_s",
    "compute_s",
    "gap_s",
    "prefill_tokens",
    "decodes",
    "decode_context",
    "text",
)

Cell = str | int


def run_begin(timeline: Timeline) -> float:
    """Return the start of the run window on rank 0's clock, in seconds. It is known before the window's end."""
    return timeline.issued[0].at_s if timeline.issued else timeline.stages[0].start.at_s


def stage_rows(timeline: Timeline) -> Iterator[tuple[Cell, ...]]:
    """Yield the lines of the file without the heading. Each line has its cells in the order of COLUMNS.

    compute_s is end_s - start_s. gap_s is the time from the end of the stage's previous compute to start_s, minus the
    LM heads in between.
    """
    issued: dict[int, tuple[Cell, ...]] = {
        event.microbatch: (event.prefill_tokens, event.decodes, event.decode_context, event.text)
        for event in timeline.issued
    }
    unknown: tuple[Cell, ...] = ("", "", "", "")
    begin = run_begin(timeline)
    for stage in timeline.stages:
        heads = deque(_head_rows(stage, begin))
        for position, microbatch in enumerate(stage.microbatches):
            while heads and heads[0][0] <= stage.starts[position]:
                yield heads.popleft()[1]
            times = _times(stage, position, begin)
            yield (microbatch, stage.start.stage, *times, *issued.get(microbatch, unknown))
        yield from (row for _, row in heads)


def write_csv(timeline: Timeline, file: TextIO) -> None:
    """Write the heading and all lines. The file must be open for text with newline="", as the csv module requires."""
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(stage_rows(timeline))


def _head_rows(stage: StageTimeline, begin: float) -> Iterator[tuple[float, tuple[Cell, ...]]]:
    """Yield (start in seconds, line) for each LM head that the stage computed."""
    heads = stage.heads
    columns = zip(heads.microbatches, heads.arrived, heads.starts, heads.ends, strict=True)
    for microbatch, arrived, start, end in columns:
        times = (*(_seconds(instant - begin) for instant in (arrived, start, end)), _seconds(end - start))
        yield start, (microbatch, stage.start.stage, "", *times, "", "", "", "", "head")


def _times(stage: StageTimeline, position: int, begin: float) -> tuple[str, ...]:
    start, end = stage.starts[position], stage.ends[position]
    instants = (stage.issued[position], stage.arrived[position], start, end)
    gap = gap_before(stage, position)
    relative = tuple(_seconds(instant - begin) for instant in instants)
    return (*relative, _seconds(end - start), "" if gap is None else _seconds(gap))


def _seconds(value: float) -> str:
    return f"{value:.9f}"
