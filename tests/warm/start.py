"""Commands that tests start begin warm: with torch, transformers and this package imported.

Importing them takes a process four seconds of a core, and what most tests then do takes less than one. For the test all
is as ever: the process is its child, with words, folder, variables, files and a session of its own. What cannot be had
this way begins cold: another program, one with other variables of those that are read only once, and everything under
`--full`, which shows that nothing depends on it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.warm.command import Command, ForkExec, parse_command, read_at_start

_ROOT = Path(__file__).resolve().parents[2]
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# What /proc shows of a process's words and variables has to fit where its first ones were.
_ROOM = "x" * 16_384

start_cold = subprocess._fork_exec  # type: ignore[attr-defined]


class _Server:
    """The process that forks commands; see server.py. It is started when it is first asked."""

    def __init__(self) -> None:
        paths = [str(_ROOT), str(_ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one = threading.Lock()

    def fork(self, command: Command) -> int:
        """Return the number of the process, a child of this one, that runs the command."""
        with self._one:
            if self._process is None:
                self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(self._asking, [pickle.dumps(command)], list(command.descriptors.values()))
                return int(self._asking.recv(64))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._asking.close()
        self._asked.close()
        if self._process is not None:
            self._process.wait()

    def _start(self) -> None:
        number = self._asked.fileno()
        command = (sys.executable, "-P", "-m", "tests.warm.server", str(number), _ROOM)
        self._process = subprocess.Popen(command, env={**self.variables, "ROOM": _ROOM}, pass_fds=[number])
        self._asked.close()


def begin() -> None:
    """From now on, for what this process starts."""
    server = _Server()

    def fork_exec(*given: Any) -> int:
        command = parse_command(ForkExec(*given[: len(ForkExec._fields)]))
        if command is None or command.program.module == "tests.warm.server":
            return int(start_cold(*given))
        if read_at_start(command.variables) != read_at_start(server.variables):
            return int(start_cold(*given))
        return server.fork(command)

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    atexit.register(server.close)


def begin_forking() -> None:
    """From now on, in a launcher that has itself begun warm: ranks are forks of its own."""
    from tests.warm.become import become  # which a test's own process does without: it imports torch

    def fork_exec(*given: Any) -> int:
        command = parse_command(ForkExec(*given[: len(ForkExec._fields)]))
        if command is None or "RANK" not in command.variables:
            return int(start_cold(*given))
        if read_at_start(command.variables) != read_at_start(os.environ):
            return int(start_cold(*given))
        pid = os.fork()
        if pid == 0:
            become(command)
        return pid

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
