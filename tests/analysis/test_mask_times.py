"""Waits for masks are summed per stage, and are no lack of CPU time."""

from __future__ import annotations

from sarathi_pp.analysis.timeline import StageTimeline
from sarathi_pp.trace.events import Compute, Head
from tests.analysis.schedules import start


def test_waits_of_layers_and_of_moved_heads_are_summed_and_left_out_of_the_cpu_ratio():
    stage = StageTimeline(start(0, 2))
    stage.add(Compute(0, 0.0, 0.0, 0.0, 1.0, 0.75))
    assert stage.mask_s is None
    stage.add(Compute(1, 1.0, 1.0, 1.0, 2.0, 0.5, mask_s=0.5))
    stage.add_head(Head(2, 2.0, 2.0, 3.0, 0.75, 0.25))
    assert stage.mask_s == 0.75
    assert (stage.cpu_s, stage.spanned_s) == (2.0, 2.25)
