"""Worker processes on this machine, started and watched.

A worker is a process of our own command with RANK in its environment. Workers find each other in a file (a FileStore)
in a directory that only this user can open, and talk over gloo on loopback. So nothing listens outside this machine.
torchrun's own rendezvous listens on every interface, and unpickles everything that it receives. This module does not
import torch, because the workers would start only after that import, which takes seconds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sarathi_pp.distributed.environment import (
    LAUNCHER_VARIABLE,
    RESTART_VARIABLE,
    STORE_VARIABLE,
    RankEnvironment,
    begun_mark,
    heeded_mark,
    stopped_mark,
)
from sarathi_pp.distributed.network_interface import require_loopback
from sarathi_pp.errors import EXIT_OK, EXIT_ROWS_FAILED, PeerLostError, StoppedError, signal_name
from sarathi_pp.process.console import Console
from sarathi_pp.process.host import usable_cpus
from sarathi_pp.process.signals import DRAIN_S, ignore_signals
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.mesh import Mesh

# Seconds between two checks for ranks that have ended, and for signals.
_POLL_S = 0.1
# Most seconds for the other ranks to notice the failure of one rank, and to end on their own.
_ECHO_S = 3.0
# Most seconds for the other ranks to end, for example to release a GPU, after rank 0 has finished and has their traces.
_LEAVE_S = 30.0
# Most seconds for a rank to end after SIGTERM, and after SIGKILL.
_STOP_S = 2.0
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# Most seconds to finish the running requests after a signal, and to write down how the run ended.
_DRAIN_S = DRAIN_S + 5.0

Process = subprocess.Popen[bytes]


class Workers:
    """The ranks of one run from `first_rank` on, as child processes of this one.

    Args:
        store: path of the file in which the ranks find each other.
        mesh: the replica, stage and shard of each rank.
        first_rank: 0, or 1 if this process is rank 0 itself.
        restart: number of earlier starts of the run, each with its own store.
        descriptors: open file descriptors of this process that rank 0 inherits.

    Attributes:
        told_to_stop: True if rank 0 got a signal that this process did not send.
    """

    def __init__(
        self, store: Path, mesh: Mesh, *, first_rank: int = 0, restart: int = 0, descriptors: Sequence[int] = ()
    ) -> None:
        self.store = store
        self._mesh = mesh
        self._world_size = mesh.size
        self._first_rank = first_rank
        self._restart = restart
        self._descriptors = descriptors
        self.told_to_stop = False
        self._killed: set[int] = set()  # killed ranks that were reported
        self._processes: dict[int, Process] = {}

    def rank_environment(self, rank: int) -> RankEnvironment:
        """Return the environment that a rank finds when it starts."""
        return RankEnvironment(rank, self._world_size, rank, self._world_size, store=str(self.store))

    def start(self, arguments: Sequence[str]) -> None:
        """Start `sarathi-pp ARGUMENTS` as every rank.

        Raises:
            ConfigError: the loopback interface is down, so the ranks could not talk to each other.
        """
        if self._world_size > 1:
            require_loopback()
        command = (sys.executable, "-P", "-m", "sarathi_pp", *arguments)
        for rank in range(self._first_rank, self._world_size):
            environment = {**os.environ, **self._variables(rank)}
            # Each rank has its own session. So Ctrl-C in the terminal goes only to this process, which stops the ranks.
            given = () if rank else self._descriptors
            self._processes[rank] = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=given)

    def ended(self) -> dict[int, str]:
        """Return a text for each rank that no longer runs, such as "ended with exit code 2", by rank."""
        codes = {rank: process.poll() for rank, process in list(self._processes.items())}
        return {
            rank: f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            for rank, code in codes.items()
            if code is not None
        }

    def wait(self, console: Console, noted: Sequence[int]) -> int | None:
        """Wait until all ranks have ended, or until one has failed and the others were stopped.

        After a failure, the other ranks get _ECHO_S to notice it and to end on their own. They end with 75 then,
        because they lost a rank. Any other code names the cause. If there are several replicas, some may be lost, and
        the run lasts as long as rank 0. After rank 0 has finished, the other ranks get _LEAVE_S. If they still run
        then, that does not change the exit code of the run.

        Args:
            console: reports a worker that was killed, because it could not report this itself.
            noted: signals that have come. The first one is passed on to rank 0, which then finishes the running
                requests.

        Returns:
            The exit code of the run. None if ranks still run after a signal, because rank 0 does not handle signals
            yet, a second signal came, or finishing the requests took too long.
        """
        clock = SystemClock()
        told_s: float | None = None
        while not self._is_over(self._codes(console)):
            if noted and told_s is None:
                if not heeded_mark(self.store).exists():
                    return None
                told_s = clock.now()
                self._processes[self._first_rank].send_signal(noted[0])
            late = told_s is not None and noted[0] != signal.SIGINT and clock.now() > told_s + _DRAIN_S
            if len(noted) > 1 or late:
                return None
            clock.sleep(_POLL_S)
        finished = self._has_finished(self._codes(console))
        left_s = _LEAVE_S if finished else _ECHO_S
        deadline_s = clock.now() + left_s
        while None in self._codes(console).values() and clock.now() < deadline_s:
            if len(noted) > 1:
                return None
            clock.sleep(_POLL_S)
        codes = self._codes(console)
        if finished:
            for rank in (rank for rank, code in codes.items() if code is None):
                console.error(f"{self._mesh.title(rank)} had not ended {left_s:g} s after rank 0, and was killed")
        self.told_to_stop = stopped_mark(self.store).exists()  # read before stop(), which sends a signal itself
        self.stop()
        return codes[self._first_rank] if finished else self._cause(codes)

    def _cause(self, codes: Mapping[int, int | None]) -> int:
        """Return the run's exit code, derived from those of its ranks."""
        first = codes[self._first_rank]
        if self._may_lose_replicas() and first is not None and first >= 0 and first != PeerLostError.exit_code:
            return first  # rank 0 has written the answers of all replicas, or has reported the cause
        failed = [code for code in codes.values() if code]
        causes = [code for code in failed if code > 0 and code != PeerLostError.exit_code]
        return causes[0] if causes else PeerLostError.exit_code if failed else 0

    def _is_over(self, codes: Mapping[int, int | None]) -> bool:
        """Return whether the run has finished or failed, although some ranks may still run."""
        if None not in codes.values():
            return True
        if self._may_lose_replicas():
            return codes[self._first_rank] is not None
        return any(codes.values()) or self._has_finished(codes)

    def _has_finished(self, codes: Mapping[int, int | None]) -> bool:
        """Return whether rank 0 has finished the run, so that the other ranks only have to end.

        It is False if there are several replicas, because the ranks of a lost replica may never end.
        """
        return codes[self._first_rank] in (EXIT_OK, EXIT_ROWS_FAILED) and not self._may_lose_replicas()

    def finished_with(self) -> int | None:
        """Return rank 0's exit code if it has finished the run, even if signals came meanwhile; otherwise None."""
        first = self._processes.get(self._first_rank)
        code = first.poll() if first is not None else None
        return code if code in (EXIT_OK, EXIT_ROWS_FAILED) else None

    def _may_lose_replicas(self) -> bool:
        """Return whether the run goes on if a replica is lost: there are several, and all ranks are set up."""
        return self._mesh.replicas > 1 and begun_mark(self.store).exists()

    def _codes(self, console: Console) -> dict[int, int | None]:
        """Return the exit code of each rank: the negative signal number if it was killed, None if it still runs.

        Report each killed rank on the console, once.
        """
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        for rank, code in codes.items():
            if code is not None and code < 0 and rank not in self._killed:
                self._killed.add(rank)
                console.error(f"{self._mesh.title(rank)} was killed by {signal_name(-code)}")
        return codes

    def stop(self) -> None:
        """End all ranks. Only a rank that hangs inside the kernel may be left, because SIGKILL does not end it.

        Rank 0 gets SIGTERM first, because it may have output lines to write. The other ranks have nothing to write and
        get only SIGKILL. They ignore all other signals, so that a batch system's signal to all processes of a job is
        handled only by rank 0.
        """
        for ranks, how in (({0}, signal.SIGTERM), (self._processes.keys(), signal.SIGKILL)):
            running = [self._processes[rank] for rank in ranks & self._processes.keys()]
            running = [process for process in running if process.poll() is None]
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
            _wait(running, _STOP_S)

    def _variables(self, rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables that a rank gets in addition to those of this process."""
        threads = max(1, usable_cpus() // self._world_size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            STORE_VARIABLE: str(self.store),
            LAUNCHER_VARIABLE: str(os.getpid()),
            RESTART_VARIABLE: str(self._restart),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(threads)),
        }


def descriptors_of(*paths: str) -> tuple[int, ...]:
    """Return the file descriptors of this process that some of the paths name, such as 63 for /dev/fd/63.

    A shell writes such a path for `<(...)`. Another process can open it only if it inherits the descriptor.
    """
    found = (re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", path) for path in paths)
    return tuple(int(match[1]) for match in found if match)


def launch(
    mesh: Mesh,
    arguments: Sequence[str],
    console: Console,
    *,
    max_restarts: int = 0,
    descriptors: Sequence[int] = (),
) -> int:
    """Run `sarathi-pp ARGUMENTS` as all ranks of a mesh to the end, and return the exit code of the run.

    This process must then end with that code, because signals are ignored from then on.

    Args:
        max_restarts: number of times that all ranks are started again after one was lost. Each start resumes the run.
        descriptors: see Workers.
    """
    with tempfile.TemporaryDirectory(prefix="sarathi-pp-") as directory, _noting(_STOPPING) as noted:
        for restart in range(max_restarts + 1):
            store = Path(directory) / f"store-{restart}"
            workers = Workers(store, mesh, restart=restart, descriptors=descriptors)
            try:
                workers.start(arguments)
                code = workers.wait(console, noted)
            finally:
                workers.stop()
            if code is None:
                code = workers.finished_with()
            stopped = bool(noted) or workers.told_to_stop
            if code != PeerLostError.exit_code or stopped or restart == max_restarts:
                break
            console.error(f"a stage was lost: restart {restart + 1} of {max_restarts}")
    if noted and code in (None, PeerLostError.exit_code):
        return StoppedError.by(noted[0], "the run").exit_code
    assert code is not None, "workers are abandoned only after a signal"
    return code


@contextmanager
def _noting(signals: Iterable[signal.Signals]) -> Iterator[list[int]]:
    """Collect the signals that come, in order, without interrupting the start or the end of a worker.

    After the block, signals are ignored until this process has ended, because they come too late to change its exit
    code. Python sets handlers only in the main thread. If another thread calls this, signals keep their earlier effect.
    """
    noted: list[int] = []
    for one in signals:
        if signal.getsignal(one) is not signal.SIG_IGN:
            with suppress(ValueError):
                signal.signal(one, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        ignore_signals()


def _wait(processes: Iterable[Process], timeout_s: float) -> None:
    """Wait until all processes have ended, at most `timeout_s` in total."""
    clock = SystemClock()
    deadline_s = clock.now() + timeout_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - clock.now()))
