"""Memory that a tree of processes takes, watched while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from sarathi_pp.trace.clock import SystemClock

_LOOK_S = 1.0
# Reading it walks the page tables of every process, 60 ms for 2 GB: no more than this share of a core.
_MOST_SHARE = 0.01


class Footprint:
    """peak_bytes: of all processes together, a page that several share counted once; 0 before the first look."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        """Until left, looks once a second at the process and what it has started; less often where that takes long."""
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
    """Of a process and its descendants now, each page divided by those that map it; 0 where it has ended."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total
