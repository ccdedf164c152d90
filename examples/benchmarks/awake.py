"""Cores that stay awake while something is measured.

A virtual core that has nothing to do is handed back, and on a busy host it may take milliseconds to come back when a
message arrives: a wait that is neither the runtime's nor that of a machine of one's own. So every core gets a loop that
runs only when nothing else wants to.

SCHED_IDLE by itself is not enough. Where Linux shares cores out by session first (autogroups), a session that holds
nothing but such loops gets as much as any other, and torchrun's workers, which are sessions of their own, lose a
quarter of their cores to it. So each loop is a session too, of the least weight there is: 15 against 1024.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself when whoever started it is gone.
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
    """For as long as it is entered, no core goes to sleep; the process ids of what keeps them awake."""
    command = (sys.executable, "-c", _SPIN, str(os.getpid()))
    loops = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield tuple(loop.pid for loop in loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
