"""Commands that tests start are warm: with torch, transformers and this package imported.

Importing them takes four seconds of a core, and most tests then need less than one. A test sees no difference: the
process is its child, with words, folder, variables, files and a session of its own. Two things do differ. All processes
have one seed of string hashes, and ranks have the launcher's earlier imports.

Some commands start cold: other programs and their children, and commands that change a variable which is read only
once. Workers of xdist start warm too. Under `--full` and `--cold` every process starts cold.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from tests.warm.command import PYTHON, Command, ForkExec, has_gpus, is_rank, parse_command, read_at_start

_ROOT = Path(__file__).resolve().parents[2]
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# The words and variables of a process that /proc shows must fit into the space of its first ones.
_ROOM = "x" * 16_384

_SERVER = "tests.warm.server"
_LAUNCHERS = ("sarathi_pp", "torch.distributed.run")
# The server of a worker of xdist that started warm: numbers of its request socket and its process.
SERVER_VARIABLE = "SARATHI_PP_TEST_SERVER"
# Number of files that a request can pass on.
MAX_DESCRIPTORS = 64

# One thread at a time asks for a fork, because meanwhile this process adopts orphans.
_turn = threading.Lock()

start_cold = subprocess._fork_exec  # type: ignore[attr-defined]


class _Server:
    """A process that forks commands; see server.py. It is started at the first request.

    Args:
        more: variables.
    """

    def __init__(self, **more: str) -> None:
        paths = [str(_ROOT), str(_ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # of tests/kernels
        self.variables = {**given, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}
        self._asked, self._asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid: int | None = None  # None before the first request

    @classmethod
    def inherit(cls, variable: str) -> _Server:
        """Return the server that was forked with this process. variable: the value of SERVER_VARIABLE."""
        server = cls()
        server._asked.close()
        server._asking.close()
        asking, server._pid = map(int, variable.split())
        server._asking = socket.socket(fileno=asking)
        os.set_inheritable(asking, False)
        return server

    def fork(self, command: Command) -> int:
        """Return the number of the process, a child of this one, that runs the command."""
        with _turn:
            if self._pid is None:
                self._start()
            return self._fork(command)

    def _fork(self, command: Command) -> int:
        reader, writer = os.pipe()  # for this request only: a test that is interrupted leaves no answer to the next one
        with open(reader) as answer:
            _adopt_orphans(True)
            try:
                self._ask(command, writer)
                pid = _read_pid(answer)
            finally:
                _adopt_orphans(False)
        if not pid:
            raise RuntimeError("the process that forks commands has not forked this one; it said why")
        return int(pid)

    def _ask(self, command: Command, writer: int) -> None:
        try:
            socket.send_fds(self._asking, [pickle.dumps(command)], [*command.descriptors.values(), writer])
        finally:
            os.close(writer)

    def close(self) -> None:
        self._asking.close()
        self._asked.close()
        if self._pid is not None:
            with suppress(ChildProcessError):  # a test has waited for all of this process's children
                os.waitpid(self._pid, 0)

    def _start(self) -> None:
        number = self._asked.fileno()
        command = (PYTHON, "-P", "-m", _SERVER, str(number), _ROOM)
        process = subprocess.Popen(command, env={**self.variables, "ROOM": _ROOM}, pass_fds=[number])
        self._pid, process.returncode = process.pid, 0  # `close` waits for it
        self._asked.close()
        if self._asking.recv(16) != b"ready":
            raise RuntimeError("the process that forks commands has ended; it said why")


def _read_pid(answer: TextIO) -> str:
    try:
        return answer.read()
    except BaseException:  # a signal's handler raised it; the process would be left alone
        if pid := answer.read():
            os.kill(int(pid), signal.SIGKILL)
        raise


def begin() -> None:
    """Start forking commands that this process starts."""
    inherited = os.environ.pop(SERVER_VARIABLE, None)
    plain = _Server.inherit(inherited) if inherited else _Server()
    with_gpus = _Server(TRITON_INTERPRET="1")
    tests = os.getpid()

    def fork_exec(*given: Any) -> int:
        command = parse_command(ForkExec(*given[: len(ForkExec._fields)]))
        if command is None or command.program.module == _SERVER or os.getpid() != tests:
            return int(start_cold(*given))
        server = with_gpus if has_gpus(command.variables) else plain
        return server.fork(command) if _may_be_warm(command, server.variables) else int(start_cold(*given))

    _replace(fork_exec)
    atexit.register(plain.close)
    atexit.register(with_gpus.close)


def begin_forking(running: Command) -> None:
    """Start forking processes of this one, which was started warm to run the command `running`.

    A launcher forks its ranks. A script, such as an example, forks launchers and ranks while it has one thread.
    """
    from tests.warm.become import become  # a test's own process does not need it: it imports torch

    launcher = running.program.module in _LAUNCHERS

    def fork_exec(*given: Any) -> int:
        command = parse_command(ForkExec(*given[: len(ForkExec._fields)]))
        if command is None or not _may_be_warm(command, running.variables) or not may_fork():
            return int(start_cold(*given))
        rank = is_rank(command.variables)
        if not rank and (launcher or command.program.module not in _LAUNCHERS):
            return int(start_cold(*given))
        pid = os.fork()
        if pid == 0:
            subprocess._fork_exec = start_cold  # type: ignore[attr-defined]  # a rank has threads: it forks nothing
            if not rank:
                begin_forking(command)
            become(command)
        return pid

    def may_fork() -> bool:
        """Check if this process may fork. A fork has one thread and all locks; a launcher's locks do little harm."""
        if launcher:
            return threading.current_thread() is threading.main_thread()
        return len(os.listdir("/proc/self/task")) == 1

    _replace(fork_exec)


def _replace(fork_exec: Callable[..., int]) -> None:
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]  # it would bypass the line above


def _may_be_warm(command: Command, variables: Mapping[str, str]) -> bool:
    """Check if variables that are read only at a start have the same values as in this process."""
    fits = len(command.descriptors) <= MAX_DESCRIPTORS
    return fits and read_at_start(command.variables) == read_at_start(variables)


def _adopt_orphans(on: bool) -> None:
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError("this kernel lets no process adopt orphans")
