"""Jobs that take turns on the same cores, so that changes of a shared host affect all of them.

A virtual core may take 2.5 times as long for the same product while a neighbour computes on its other hardware thread.
No counter shows that, and it changes from one second to the next. Runs one after another then differ by more than the
effect that is measured. So each job runs for a short turn, is stopped by a signal, and continues in its next turn.
Afterwards the time in which it was stopped is removed from its traces. The result is the run without interruptions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from sarathi_pp.analysis.intervals import Interval
from sarathi_pp.trace.events import Event, RequestFinished

# Seconds of a turn: long compared with a microbatch and with refilling caches, short compared with changes of the host.
TURN_S = 4.0
_LOOK_S = 0.02
_TIMES = {"at_s", "issued_s", "arrived_s", "start_s", "end_s", "first_issue_s", "first_token_s", "finished_s"}

Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class _Job:
    """Processes that run and are stopped together.

    Attributes:
        away: intervals in which all of them were stopped, on the monotonic clock. To find and signal all processes
            takes milliseconds. These are not part of an interval, because some processes still run then.
    """

    start: Callable[[], Sequence[Process]]
    processes: Sequence[Process] = ()
    away: list[Interval] = field(default_factory=list)
    _stopped_s: float | None = None

    @property
    def over(self) -> bool:
        return bool(self.processes) and all(process.poll() is not None for process in self.processes)

    def go(self) -> None:
        if not self.processes:
            self.processes = self.start()
        elif self._stopped_s is not None:
            self.away.append((self._stopped_s, time.monotonic()))
            self._signal(signal.SIGCONT)
            self._stopped_s = None

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self._stopped_s = time.monotonic()

    def end(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Send a signal to all processes and their descendants, including those that they start meanwhile."""
        told: set[int] = set()
        while new := set(_with_descendants(process.pid for process in self.processes if process.poll() is None)) - told:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= new


def take_turns(jobs: Mapping[str, Callable[[], Sequence[Process]]]) -> dict[str, list[Interval]]:
    """Start every job and run all of them to their ends, in turns.

    Returns:
        For each job, the intervals in which it was stopped.

    Raises:
        CalledProcessError: a process failed. The other jobs were ended.
    """
    started = {name: _Job(start) for name, start in jobs.items()}
    waiting = list(started.values())
    try:
        while waiting:
            job = waiting.pop(0)
            job.go()
            until_s = time.monotonic() + TURN_S
            while not job.over and (time.monotonic() < until_s or not waiting):
                time.sleep(_LOOK_S)
            if not job.over:
                job.stop()
                waiting.append(job)
            for process in job.processes:
                if process.returncode:
                    raise subprocess.CalledProcessError(process.returncode, process.args)
    finally:
        for job in waiting:
            job.end()
    return {name: job.away for name, job in started.items()}


def without(away: Sequence[Interval], events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a trace of this machine, without the time in which its process was stopped."""
    ends = [end for _, end in away]
    lost = [0.0, *accumulate(end - begin for begin, end in away)]

    def present(at_s: float) -> float:
        index = bisect_right(ends, at_s)
        begin = away[index][0] if index < len(away) else at_s
        return min(at_s, begin) - lost[index]

    for event in events:
        times = {name: getattr(event, name) for name in _TIMES & {field.name for field in fields(event)}}
        moved: dict[str, Any] = {name: present(at_s) for name, at_s in times.items() if at_s is not None}
        if isinstance(event, RequestFinished) and event.first_token_s is not None:
            tokens_s = accumulate((gap / 1e6 for gap in event.gaps_us), initial=event.first_token_s)
            gaps = pairwise(map(present, tokens_s))
            event = replace(event, gaps_us=tuple(round(1e6 * (later - earlier)) for earlier, later in gaps))
        yield replace(event, **moved)


def _with_descendants(pids: Iterable[int]) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pending = list(pids)
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, [])
