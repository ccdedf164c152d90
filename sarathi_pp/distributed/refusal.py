"""A rank that cannot take part reports this to the others. Otherwise they would wait for it until --join-timeout."""

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
    """Report to the user and to all ranks why this rank does not join. The other ranks then raise the same error.

    Returns:
        The exit code for this process.

    Raises:
        SarathiError: `error` itself, if all ranks are on this host. Their launcher or agent then ends them.
    """
    if env.local_world_size == env.world_size:
        report_cause(env)
        raise error
    if speaks_for_host():
        console.error(f"{type(error).__name__}: {error}")
    # If the other ranks cannot be reached, the user has seen the error above.
    with suppress(SarathiError, RuntimeError):
        report_refusal(error, env, join_timeout_s)
    return error.exit_code


def report_refusal(error: SarathiError, env: RankEnvironment, timeout_s: float) -> None:
    """Report to the joining ranks why this rank does not join.

    Raises:
        SarathiError: `error` itself, or the error that prevents the report.
    """
    # They import torch. At the top of the module, this would delay the error message by seconds.
    from sarathi_pp.distributed.rendezvous import rendezvous
    from sarathi_pp.distributed.store import open_store

    clock = SystemClock()
    end_s = clock.now() + timeout_s
    store = open_store(env, timedelta(seconds=timeout_s))
    rendezvous(store, env.rank, env.world_size, end_s, clock, choose_interface(env), error)
