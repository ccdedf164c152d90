"""A process in a session of its own, and the end of everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import psutil

# Seconds for a process to end after SIGKILL. One that hangs in a driver never does, and is left.
_KILLED_S = 5.0


@contextmanager
def family(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    grace_s: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process. At the end of the block, end it and all processes that it started.

    Args:
        stdout: file for its standard output.
        stderr: file for its standard error.
        grace_s: seconds from SIGTERM to SIGKILL if it still runs then; 0 sends SIGKILL only.
    """
    process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        yield process
    finally:
        _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and all processes that it started.

    Some of them may have outlived it. These are found by its process group.
    """
    members: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            members = psutil.Process(process.pid).children(recursive=True)
        if grace_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:  # our own workers have sessions of their own, which killpg does not reach
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
