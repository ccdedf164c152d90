"""The memory of a tree of processes, measured while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from sarathi_pp.trace.clock import SystemClock

_LOOK_S = 1.0
# Largest share of a core's time that measuring may take. A measurement walks the page tables of every process. This
# takes 60 ms for 2 GB.
_MOST_SHARE = 0.01


class Footprint:
    """The most memory that a tree of processes has taken so far.

    Attributes:
        peak_bytes: sum over all processes. A page that several of them share counts once. 0 before the first
            measurement.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        """Measure the process and its descendants inside the block, once per second, or less often if that is slow."""
        over, clock = threading.Event(), SystemClock()

        def watch() -> None:
            pause_s = _LOOK_S
            while not over.wait(pause_s):
                began_s = clock.thread_cpu()
                self.peak_bytes = max(self.peak_bytes, proportional_bytes(pid))
                pause_s = max(_LOOK_S, (clock.thread_cpu() - began_s) / _MOST_SHARE)

        thread = threading.Thread(target=watch, name="footprint", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def proportional_bytes(pid: int) -> int:
    """Return the bytes of memory of a process and its descendants; 0 if the process has ended.

    If several processes share a page, each counts an equal part of it (proportional set size, PSS).
    """
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total
