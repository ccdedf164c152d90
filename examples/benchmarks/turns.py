"""Jobs that take turns on the same cores, so that whatever a shared host does in those minutes happens to all of them.

A virtual core may take 2.5 times as long for the same product while a neighbour computes on its other hardware thread;
that shows nowhere, and changes from one second to the next. Runs one after the other then differ by more than what is
to be compared. So each runs for a moment, is stopped where it is, and goes on in its next turn. Afterwards the time in
which it stood still is taken out of its traces: what is left is the run that it would have been.
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

# Long against a microbatch and what a job needs to find its caches again, short against how long a host stays as it is.
TURN_S = 4.0
_LOOK_S = 0.02
_TIMES = {"at_s", "issued_s", "arrived_s", "start_s", "end_s", "first_issue_s", "first_token_s", "finished_s"}

Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class _Job:
    """Processes that run and stand still together. away: when all of them stood still, on the monotonic clock.

    Finding and telling all of them takes milliseconds, and a span of one that runs by then must not seem to take none.
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
        """To all of them, those included that they start meanwhile."""
        told: set[int] = set()
        while new := set(_with_descendants(process.pid for process in self.processes if process.poll() is None)) - told:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= new


def take_turns(jobs: Mapping[str, Callable[[], Sequence[Process]]]) -> dict[str, list[Interval]]:
    """Starts every job and runs all to their ends, a turn each, in order; when each of them stood still.

    Raises CalledProcessError for the first process that failed, when the others have been ended.
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
    """A trace of this machine as if the time in which its process stood still had not passed."""
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
