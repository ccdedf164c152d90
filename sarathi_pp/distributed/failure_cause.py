"""One message for one cause: a rank that has said why the run ends, and the others that only notice that it is gone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import PeerLostError, SarathiError, StoppedError


def report_cause(env: RankEnvironment) -> None:
    """Let the other ranks of this host know that this one says why the run ends. Call it before the rank leaves."""
    path = _mark(env)
    if path is not None:
        with suppress(OSError):
            path.touch()


def is_echo(error: SarathiError, env: RankEnvironment) -> bool:
    """Return whether an error is only how this rank notices that another one has ended with a message of its own.

    Rank 0 always speaks. On other hosts, where nobody reads its message, the others do too.
    """
    path = _mark(env)
    return env.rank != 0 and path is not None and isinstance(error, PeerLostError | StoppedError) and path.exists()


def _mark(env: RankEnvironment) -> Path | None:
    """Return a file of this start that its ranks on this host share: of our launcher, or in torchrun's folder."""
    if env.store is not None:
        return Path(f"{env.store}.cause")
    return Path(env.attempt_dir) / "sarathi-pp-cause" if env.attempt_dir else None
