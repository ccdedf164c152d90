"""Traces of synthetic runs: a pipeline that is computed, not run, with delays at any point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.trace.events import (
    Compute,
    Event,
    Issued,
    RequestArrived,
    RequestFinished,
    Returned,
    SendWait,
    TraceEnd,
    TraceStart,
)

Delay = Callable[[int, int], float]


def nothing(microbatch: int, stage: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Schedule:
    """A run of FIFO stages: seconds by (microbatch, stage).

    Args:
        issue: before the coordinator issues the microbatch, after the previous one (stage is 0).
        transfer: on the edge into the stage.
        host: between a complete input and the start, with the stage free.
        compute: the span.
        send_wait: after the span, before the stage can do anything else or its output leaves.
    """

    microbatches: int
    stages: int
    compute: Delay
    issue: Delay = nothing
    transfer: Delay = nothing
    host: Delay = nothing
    send_wait: Delay = nothing
    cpu_share: float | None = 1.0

    def events(self, *, complete: bool = True) -> list[list[Event]]:
        """Return one trace per stage.

        Each microbatch has one request, `s<m>`, which arrived at 0 and is done on its return.
        """
        clocks = [ManualClock() for _ in range(self.stages)]
        traces: list[list[Event]] = [[start(stage, self.stages)] for stage in range(self.stages)]
        rank0 = traces[0]
        rank0 += [RequestArrived(index, 0.0, 10) for index in range(self.microbatches)]
        issue_clock = ManualClock()
        for m in range(self.microbatches):
            issue_clock.sleep(self.issue(m, 0))
            issued_s = issue_clock.now()
            rank0.append(Issued(m, issued_s, f"m{m}[s{m}:0+10]", 10, 0, 0, 50.0, 2, 24))
            ready = issued_s
            for stage, clock in enumerate(clocks):
                arrived_s = ready + self.transfer(m, stage)
                clock.sleep(max(0.0, arrived_s - clock.now()))
                clock.sleep(self.host(m, stage))
                start_s = clock.now()
                clock.work(self.compute(m, stage))
                end_s = clock.now()
                cpu_s = None if self.cpu_share is None else (end_s - start_s) * self.cpu_share
                traces[stage].append(Compute(m, issued_s, arrived_s, start_s, end_s, cpu_s))
                if self.send_wait(m, stage):
                    clock.sleep(self.send_wait(m, stage))
                    traces[stage].append(SendWait(end_s, clock.now()))
                ready = clock.now()
            rank0.append(Returned(m, ready))
            rank0.append(RequestFinished(m, 0.0, issued_s, ready, ready, 10, 1, "length"))
        if complete:
            for trace, clock in zip(traces, clocks, strict=True):
                trace.append(TraceEnd(at_s=clock.now(), peak_rss_bytes=1 << 30, bytes_read=1 << 20))
        return traces


def start(stage: int, num_stages: int, *, offset_s: float = 0.0, uncertainty_s: float = 0.0) -> TraceStart:
    return TraceStart(
        at_s=0.0,
        unix_s=1e9,
        rank=stage,
        stage=stage,
        num_stages=num_stages,
        layers=(4 * stage, 4 * stage + 4),
        host="here",
        pid=1,
        device="cpu",
        policy="sarathi",
        chunk_size=256,
        inflight=num_stages + 1,
        num_pages=100,
        page_size=16,
        clock_offset_s=offset_s,
        clock_uncertainty_s=uncertainty_s,
    )


def on_hosts(traces: Sequence[Sequence[Event]], *hosts: str) -> list[list[Event]]:
    """Return the same traces, written by stages on these hosts."""
    return [
        [replace(event, host=host) if isinstance(event, TraceStart) else event for event in trace]
        for trace, host in zip(traces, hosts, strict=True)
    ]


def constant(seconds: float) -> Delay:
    return lambda microbatch, stage: seconds


def once(seconds: float, microbatch: int, stage: int) -> Delay:
    return lambda m, s: seconds if (m, s) == (microbatch, stage) else 0.0


def added(*delays: Delay) -> Delay:
    return lambda m, s: sum(delay(m, s) for delay in delays)


def table(rows: Sequence[Sequence[float]]) -> Delay:
    return lambda m, s: rows[m][s]
