"""Commands that tests start begin warm: with torch, transformers and this package imported.

Importing them takes four seconds of a core, and what most tests then do takes less than one. Nothing changes for the
test: the process is its child, with words, folder, variables, files and a session of its own. Some commands begin cold:
other programs, commands that change a variable which is read only once, and commands that a thread starts. Under
`--full` all commands begin cold.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.warm.command import PYTHON, Command, ForkExec, parse_command, read_at_start

_ROOT = Path(__file__).resolve().parents[2]
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# What /proc shows of a process's words and variables has to fit where its first ones were.
_ROOM = "x" * 16_384

_SERVER = "tests.warm.server"
# How many files a request can pass on.
MAX_DESCRIPTORS = 64

start_cold = subprocess._fork_exec  # type: ignore[attr-defined]


class _Server:
    """The process that forks commands; see server.py. It is started when it is first asked."""

    def __init__(self) -> None:
        paths = [str(_ROOT), str(_ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fork(self, command: Command) -> int:
        """Return the number of the process, a child of this one, that runs the command."""
        if self._process is None:
            self._start()
        reader, writer = os.pipe()  # of this request: a test that is interrupted leaves no answer to the next one
        with open(reader) as answer:
            try:
                _adopt_orphans(True)
                descriptors = [*command.descriptors.values(), writer]
                try:
                    socket.send_fds(self._asking, [pickle.dumps(command)], descriptors)
                finally:
                    os.close(writer)
                pid = answer.read()
            finally:
                _adopt_orphans(False)
        if not pid:
            raise RuntimeError("the process that forks commands has ended; it said why")
        return int(pid)

    def close(self) -> None:
        self._asking.close()
        self._asked.close()
        if self._process is not None:
            self._process.wait()

    def _start(self) -> None:
        number = self._asked.fileno()
        command = (PYTHON, "-P", "-m", _SERVER, str(number), _ROOM)
        self._process = subprocess.Popen(command, env={**self.variables, "ROOM": _ROOM}, pass_fds=[number])
        self._asked.close()
        if self._asking.recv(16) != b"ready":
            raise RuntimeError("the process that forks commands has ended; it said why")


def begin() -> None:
    """From now on, for what this process starts."""
    server = _Server()

    def fork_exec(*given: Any) -> int:
        command = _warm_command(given, server.variables)
        if command is None or command.program.module == _SERVER:
            return int(start_cold(*given))
        return server.fork(command)

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]  # it goes past the line above
    atexit.register(server.close)


def begin_forking() -> None:
    """From now on, fork the ranks of this process, a launcher that has itself begun warm."""
    from tests.warm.become import become  # which a test's own process does without: it imports torch

    def fork_exec(*given: Any) -> int:
        command = _warm_command(given, os.environ)
        if command is None or "RANK" not in command.variables:
            return int(start_cold(*given))
        pid = os.fork()
        if pid == 0:
            subprocess._fork_exec = start_cold  # type: ignore[attr-defined]  # a rank has threads: it forks nothing
            become(command)
        return pid

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _warm_command(given: Sequence[Any], variables: Mapping[str, str]) -> Command | None:
    """Return what `subprocess` is to start, if it can begin warm where these variables were read."""
    if threading.current_thread() is not threading.main_thread():
        return None  # a process may be told to end with the thread that started it
    command = parse_command(ForkExec(*given[: len(ForkExec._fields)]))
    if command is None or len(command.descriptors) > MAX_DESCRIPTORS:
        return None
    return command if read_at_start(command.variables) == read_at_start(variables) else None


def _adopt_orphans(on: bool) -> None:
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError("this kernel lets no process adopt orphans")
