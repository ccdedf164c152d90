"""Show one message per failure.

A rank that only notices the loss of another rank shows none, if that other rank reports the cause.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import PeerLostError, SarathiError, StoppedError


def report_cause(env: RankEnvironment) -> None:
    """Let the other ranks of this host know that this rank reports the cause. Call it before the rank leaves."""
    path = _mark(env)
    if path is not None:
        with suppress(OSError):
            path.touch()


def is_echo(error: SarathiError, env: RankEnvironment) -> bool:
    """Return whether an error only repeats the end of another rank, which has reported its own message.

    Rank 0 always reports its error. On hosts without a rank that reports the cause, the other ranks report theirs too.
    """
    path = _mark(env)
    return env.rank != 0 and path is not None and isinstance(error, PeerLostError | StoppedError) and path.exists()


def _mark(env: RankEnvironment) -> Path | None:
    """Return the path of the file that exists once a rank of this host reports the cause; None without a shared folder.

    It is next to our launcher's store, or in torchrun's folder for this start.
    """
    if env.store is not None:
        return Path(f"{env.store}.cause")
    return Path(env.attempt_dir) / "sarathi-pp-cause" if env.attempt_dir else None
