"""A rank that will not take part says so to the others, which else wait for it until --join-timeout."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from sarathi_pp.distributed.environment import RankEnvironment, speaks_for_host
from sarathi_pp.distributed.failure_cause import report_cause
from sarathi_pp.distributed.network_interface import choose_interface
from sarathi_pp.errors import SarathiError
from sarathi_pp.process.console import Console
from sarathi_pp.trace.clock import SystemClock


def refuse(error: SarathiError, env: RankEnvironment, join_timeout_s: float, console: Console) -> int:
    """Say why this rank does not join: here, and to all ranks, of which rank 0 raises it with this host's name.

    Returns the exit code. Raises the error where all ranks are on this host: their launcher or agent ends them.
    """
    if env.local_world_size == env.world_size:
        report_cause(env)
        raise error
    if speaks_for_host():
        console.error(f"{type(error).__name__}: {error}")
    # Whatever keeps the others from hearing it, the cause is said.
    with suppress(SarathiError, RuntimeError):
        report_refusal(error, env, join_timeout_s)
    return error.exit_code


def report_refusal(error: SarathiError, env: RankEnvironment, timeout_s: float) -> None:
    """Tell the ranks that join why this rank does not. Raises the error, or the one that keeps it from them."""
    # Imports torch, seconds after which the error would be said.
    from sarathi_pp.distributed.rendezvous import rendezvous
    from sarathi_pp.distributed.store import open_store

    clock = SystemClock()
    end_s = clock.now() + timeout_s
    store = open_store(env, timedelta(seconds=timeout_s))
    rendezvous(store, env.rank, env.world_size, end_s, clock, choose_interface(env), error)
