"""Keep the cores awake during a measurement.

A virtual core that has nothing to do is handed back to the host. On a busy host it may take milliseconds to come back
when a message arrives. Neither the runtime nor a dedicated machine causes this wait. So every core gets a loop that
runs only when no other process needs the core.

SCHED_IDLE alone is not enough. Linux may divide cores among sessions first (autogroups). A session of idle loops then
gets the same share as any other. torchrun's workers have sessions of their own, and lost a quarter of their cores to
it. So each loop has a session too, with the least possible weight: 15 instead of 1024.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The loop ends when its parent process has ended.
_SPIN = """
import os, sys, time
os.setsid()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
for _ in range(10):
    try:
        os.write(os.open("/proc/self/autogroup", os.O_WRONLY), b"19")
        break
    except FileNotFoundError:  # no autogroups here
        break
    except BlockingIOError:  # the kernel takes so many changes a second
        time.sleep(0.2)
else:
    sys.exit("the kernel does not let this loop stand back")
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def awake() -> Iterator[tuple[int, ...]]:
    """Keep all cores awake inside the block. Yield the process ids of the loops."""
    command = (sys.executable, "-c", _SPIN, str(os.getpid()))
    loops = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield tuple(loop.pid for loop in loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
