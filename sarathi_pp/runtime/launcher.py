"""Starts one worker process a stage on this machine and waits for them.

A worker is a process of the same command line with RANK in its environment. They meet over a FileStore in a
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

from sarathi_pp.errors import PeerLostError
from sarathi_pp.runtime.topology import STORE_VARIABLE

_POLL_S = 0.1


def launch(
    num_stages: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run `sarathi-pp ARGUMENTS` as num_stages workers; returns the exit code of the run.

    Where a worker was killed the code is that of PeerLostError and `say` is told which one it was. No worker
    is left when this returns.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    command = ("-P", "-m", "sarathi_pp", *arguments)
    with tempfile.TemporaryDirectory(prefix="sarathi-pp-") as directory:
        store = Path(directory) / "store"
        workers = start_processes(
            name="sarathi-pp",
            entrypoint=sys.executable,
            args={rank: command for rank in range(num_stages)},
            envs={rank: worker_environment(rank, num_stages, store, environment) for rank in range(num_stages)},
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            result = workers.wait(period=_POLL_S)
        except SignalException as stopped:
            workers.close(stopped.sigval)
            return 130 if stopped.sigval == signal.SIGINT else PeerLostError.exit_code
        except KeyboardInterrupt:
            workers.close(signal.SIGINT)
            return 130
        finally:
            workers.close(signal.SIGTERM, timeout=5)
        return _exit_code(result.failures, say)


def worker_environment(rank: int, num_stages: int, store: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment has beyond ours."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_stages)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_stages),
        "LOCAL_WORLD_SIZE": str(num_stages),
        STORE_VARIABLE: str(store),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(threads)),
    }


def _exit_code(failures: Mapping[int, object], say: Callable[[str], None]) -> int:
    """The first failure speaks for the run; the others are its echo, or the workers we then stopped ourselves."""
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)  # type: ignore[attr-defined]
    code, rank, pid = first.exitcode, first.local_rank, first.pid  # type: ignore[attr-defined]
    if code >= 0:
        return int(code)
    say(f"stage {rank} (rank {rank}, pid {pid}) was killed by {signal.Signals(-code).name}")
    return PeerLostError.exit_code
