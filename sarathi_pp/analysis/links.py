"""The edges between neighbouring stages: which hosts they join, and what crossing them took in the run.

A transfer is from the end of a microbatch's compute on one stage until all of it had arrived at the next: it waited for
a free send buffer, behind the one before it, and travelled. Over the edge back to stage 0 tokens travel, or the rows
that its head takes, and nothing large. Where two hosts' clocks are less well known than a transfer is long, one may be
below 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from operator import sub
from typing import Any

from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.trace.latency import Spread


def links_of(timeline: Timeline) -> list[dict[str, Any]]:
    """One for each edge, from every stage to the next and then from the last to the first; none of a single stage."""
    first, *others = timeline.stages
    if not others:
        return []
    count = timeline.num_returned
    arrived = [*(stage.arrived[:count] for stage in others), timeline.back_s()[:count]]
    return [
        _link(here, there, map(sub, arrived_s, here.ends[:count]))
        for here, there, arrived_s in zip(timeline.stages, [*others, first], arrived, strict=True)
    ]


def _link(here: StageTimeline, there: StageTimeline, transfers_s: Iterable[float]) -> dict[str, Any]:
    hosts = [here.start.host, there.start.host]
    return {
        "stages": [here.start.stage, there.start.stage],
        "hosts": hosts,
        "between_hosts": hosts[0] != hosts[1],
        "transfer_s": asdict(Spread.of(transfers_s)),
    }
