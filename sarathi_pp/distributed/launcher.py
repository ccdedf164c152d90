"""Worker processes on this machine, started and watched.

A worker is a process of our own command line with RANK in its environment. They find each other in a FileStore in a
0700 directory and gloo on loopback, so nothing listens outside this machine; torchrun's own rendezvous does,
on every interface, and unpickles what it is sent. Loads no torch: the workers would wait for it.
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

_POLL_S = 0.1
_ECHO_S = 3.0
# For the other ranks once rank 0 has finished, with their traces in its hands: to leave a GPU, say.
_LEAVE_S = 30.0
_STOP_S = 2.0
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# For what runs to be finished once a signal has come, and to be written down.
_DRAIN_S = DRAIN_S + 5.0

Process = subprocess.Popen[bytes]


class Workers:
    """The ranks of one run from first_rank on, as processes of this one. mesh: who sits where.

    restart: how often the run was started before, each time with a store of its own. descriptors: open ones of this
    process that rank 0 gets. told_to_stop: whether rank 0 got a signal that was none of ours.
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
        self._killed: set[int] = set()  # of which was told
        self._processes: dict[int, Process] = {}

    def rank_environment(self, rank: int) -> RankEnvironment:
        return RankEnvironment(rank, self._world_size, rank, self._world_size, store=str(self.store))

    def start(self, arguments: Sequence[str]) -> None:
        """Run `sarathi-pp ARGUMENTS` as every rank. Raises ConfigError if they could not talk to each other."""
        if self._world_size > 1:
            require_loopback()
        command = (sys.executable, "-P", "-m", "sarathi_pp", *arguments)
        for rank in range(self._first_rank, self._world_size):
            environment = {**os.environ, **self._variables(rank)}
            # A session each: the terminal's Ctrl-C is for this process, which stops them.
            given = () if rank else self._descriptors
            self._processes[rank] = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=given)

    def ended(self) -> dict[int, str]:
        """Return how each rank has ended that has."""
        codes = {rank: process.poll() for rank, process in list(self._processes.items())}
        return {
            rank: f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            for rank, code in codes.items()
            if code is not None
        }

    def wait(self, console: Console, noted: Sequence[int]) -> int | None:
        """Until all have ended, or one has failed and the others were stopped; the exit code of the run.

        noted: signals that have come. The first is rank 0's, which then drains the run; None where it cannot yet,
        another one came, or draining has taken too long, and they still run.

        After a failure the others get a moment to notice and to end by themselves, with what they know: a lost
        peer (75) is an echo, any other code is the cause. Of several replicas some may be lost: then the run lasts as
        long as rank 0. Where that has finished, the others have longer, and no say in how the run ended if they stay.
        The console reports a worker that was killed, which could not speak for itself.
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
        self.told_to_stop = stopped_mark(self.store).exists()  # by others: what follows is a signal of ours
        self.stop()
        return codes[self._first_rank] if finished else self._cause(codes)

    def _cause(self, codes: Mapping[int, int | None]) -> int:
        """The run's exit code, from those of its ranks."""
        first = codes[self._first_rank]
        if self._may_lose_replicas() and first is not None and first >= 0 and first != PeerLostError.exit_code:
            return first  # it has answered for all replicas, or knows why not
        failed = [code for code in codes.values() if code]
        causes = [code for code in failed if code > 0 and code != PeerLostError.exit_code]
        return causes[0] if causes else PeerLostError.exit_code if failed else 0

    def _is_over(self, codes: Mapping[int, int | None]) -> bool:
        if None not in codes.values():
            return True
        if self._may_lose_replicas():
            return codes[self._first_rank] is not None
        return any(codes.values()) or self._has_finished(codes)

    def _has_finished(self, codes: Mapping[int, int | None]) -> bool:
        """Whether all that is left to do is to leave; of several replicas a lost one may never do so."""
        return codes[self._first_rank] in (EXIT_OK, EXIT_ROWS_FAILED) and not self._may_lose_replicas()

    def finished_with(self) -> int | None:
        """Return rank 0's exit code if it has finished the run, whatever signals came meanwhile; None otherwise."""
        first = self._processes.get(self._first_rank)
        code = first.poll() if first is not None else None
        return code if code in (EXIT_OK, EXIT_ROWS_FAILED) else None

    def _may_lose_replicas(self) -> bool:
        return self._mesh.replicas > 1 and begun_mark(self.store).exists()

    def _codes(self, console: Console) -> dict[int, int | None]:
        """Exit code by rank, the negative signal of one that was killed, None of one that still runs."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        for rank, code in codes.items():
            if code is not None and code < 0 and rank not in self._killed:
                self._killed.add(rank)
                console.error(f"{self._mesh.title(rank)} was killed by {signal_name(-code)}")
        return codes

    def stop(self) -> None:
        """None of them is left when this returns, but one that not even SIGKILL ends, stuck inside the kernel.

        Rank 0 may have lines to write, and is asked. The others hold nothing: they heed no other signal, so that one to
        all of a job's processes is rank 0's affair.
        """
        for ranks, how in (({0}, signal.SIGTERM), (self._processes.keys(), signal.SIGKILL)):
            running = [self._processes[rank] for rank in ranks & self._processes.keys()]
            running = [process for process in running if process.poll() is None]
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
            _wait(running, _STOP_S)

    def _variables(self, rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
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
    """Those of this process among the paths: what a shell writes for `<(...)`, and nobody else can open."""
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
    """Run `sarathi-pp ARGUMENTS` as all ranks of a mesh, to the end; returns the exit code of the run.

    max_restarts: how often all are started again after one was lost, which goes on where the run was. descriptors: see
    Workers. The process is to end with that code: signals are ignored from then on.
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
    assert code is not None, "workers are given up for a signal only"
    return code


@contextmanager
def _noting(signals: Iterable[signal.Signals]) -> Iterator[list[int]]:
    """Note the signals that come, in order, without interrupting the start or the end of a worker.

    Afterwards signals are ignored until this process has ended: they come too late to change its exit code. Python
    catches signals in the main thread only; in another thread they do what they did.
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
    """For all of them, so long at the most."""
    clock = SystemClock()
    deadline_s = clock.now() + timeout_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - clock.now()))
