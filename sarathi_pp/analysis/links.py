"""The edges between neighbouring stages: the hosts that they connect, and the transfer times of the run.

A transfer lasts from the end of a microbatch's compute on one stage until all of it has arrived at the next stage. It
includes the wait for a free send buffer, the wait for the message before it, and the time on the network. The edge back
to stage 0 carries only small messages: tokens, or the rows of the LM heads that stage 0 computes. If the offset between
two hosts' clocks is known less exactly than a transfer is long, the transfer time may be below 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from operator import sub
from typing import Any

from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.trace.latency import Spread


def links_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return one link per edge, as a dictionary: from every stage to the next, then from the last to the first.

    A single stage has no edges, so the list is empty.
    """
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
