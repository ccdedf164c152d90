"""Worker processes on this machine, started and watched through torch's elastic multiprocessing.

A worker is a process of our own command line with RANK in its environment. They meet over a FileStore in a
0700 directory and gloo on loopback, so nothing listens outside this machine; torchrun's own rendezvous does,
on every interface, and unpickles what it is sent.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sarathi_pp.errors import EXIT_INTERRUPTED, PeerLostError
from sarathi_pp.runtime.place import STORE_VARIABLE, Place
from sarathi_pp.trace.clock import SystemClock

_POLL_S = 0.1
_ECHO_S = 2.0
_STOP_S = 2


class Workers:
    """The ranks [first_rank, world_size) of one run, as processes of this one."""

    def __init__(self, store: Path, world_size: int, *, first_rank: int = 0) -> None:
        self._store = store
        self._world_size = world_size
        self._first_rank = first_rank
        self._context: Any = None

    def place(self, rank: int) -> Place:
        return Place(rank, self._world_size, rank, self._world_size, store=str(self._store))

    def start(self, arguments: Sequence[str]) -> None:
        """Run `sarathi-pp ARGUMENTS` as every rank."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        command = ("-P", "-m", "sarathi_pp", *arguments)
        ranks = range(self._first_rank, self._world_size)
        self._context = start_processes(
            name="sarathi-pp",
            entrypoint=sys.executable,
            args={index: command for index, _ in enumerate(ranks)},
            envs={index: self._environment(rank) for index, rank in enumerate(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(self._store.parent)),
        )

    def wait(self, say: Callable[[str], None]) -> int:
        """Until all have ended, or one has failed and the others were stopped; the exit code of the run.

        After a failure the others get a moment to notice and to end by themselves, with what they know: a lost
        peer (75) is an echo, any other code is the cause. `say` is told of a worker that was killed, since it
        could not speak for itself.
        """
        clock = SystemClock()
        while True:
            codes = self._codes()
            if any(code for code in codes.values()) or None not in codes.values():
                break
            clock.sleep(_POLL_S)
        deadline_s = clock.now() + _ECHO_S
        while None in codes.values() and clock.now() < deadline_s:
            clock.sleep(_POLL_S)
            codes = self._codes()
        self.stop()
        for rank, code in codes.items():
            if code is not None and code < 0:
                say(f"stage {rank} (rank {rank}) was killed by {signal.Signals(-code).name}")
        failed = [code for code in codes.values() if code]
        causes = [code for code in failed if code > 0 and code != PeerLostError.exit_code]
        return causes[0] if causes else PeerLostError.exit_code if failed else 0

    def _codes(self) -> dict[int, int | None]:
        """Exit code by rank, the negative signal of one that was killed, None of one that still runs."""
        handlers = self._context.subprocess_handlers
        return {self._first_rank + index: handler.proc.poll() for index, handler in handlers.items()}

    def stop(self) -> None:
        """None of them is left when this returns."""
        if self._context is not None:
            self._context.close(signal.SIGTERM, timeout=_STOP_S)

    def _environment(self, rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // self._world_size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            STORE_VARIABLE: str(self._store),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(threads)),
        }


def launch(num_stages: int, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `sarathi-pp ARGUMENTS` as num_stages workers, to the end; returns the exit code of the run."""
    from torch.distributed.elastic.multiprocessing import SignalException

    with tempfile.TemporaryDirectory(prefix="sarathi-pp-") as directory:
        workers = Workers(Path(directory) / "store", num_stages)
        try:
            workers.start(arguments)
            return workers.wait(say)
        except (SignalException, KeyboardInterrupt) as stopped:
            interrupted = getattr(stopped, "sigval", signal.SIGINT) == signal.SIGINT
            return EXIT_INTERRUPTED if interrupted else PeerLostError.exit_code
        finally:
            workers.stop()
