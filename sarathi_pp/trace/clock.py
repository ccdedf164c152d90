"""Clocks. Code that needs the time gets a Clock as an argument.

This is the only file that imports `time`. So tests and a simulator can run everything that takes a Clock on virtual
time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of times, all in seconds.

    `now` never goes back. Its zero is arbitrary, so its values mean nothing on another host. `wall` is unix time.
    `thread_cpu` is the CPU time of the calling thread. If it grows less than `now` over the same span, the thread did
    not run for the difference.
    """

    def now(self) -> float: ...
    def thread_cpu(self) -> float: ...
    def wall(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The host's clocks. On Linux `now` is one clock for all processes of the host."""

    def now(self) -> float:
        return time.monotonic()

    def thread_cpu(self) -> float:
        return time.thread_time()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock of virtual time. Only calls move it: `sleep` lets time pass, `work` lets time pass and uses CPU."""

    def __init__(self, now_s: float = 0.0, wall_offset_s: float = 0.0) -> None:
        self._now_s = now_s
        self._cpu_s = 0.0
        self._wall_offset_s = wall_offset_s

    def now(self) -> float:
        return self._now_s

    def thread_cpu(self) -> float:
        return self._cpu_s

    def wall(self) -> float:
        return self._now_s + self._wall_offset_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} s: time does not run backwards")
        self._now_s += seconds

    def work(self, seconds: float) -> None:
        self.sleep(seconds)
        self._cpu_s += seconds
