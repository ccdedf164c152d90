"""Report a worker process that ends before it has joined to the other ranks, so that they do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sarathi_pp.distributed.launcher import Workers
from sarathi_pp.distributed.refusal import report_refusal
from sarathi_pp.errors import PeerLostError, SarathiError

# Seconds between two checks for workers that have ended.
_LOOK_S = 0.1


@contextmanager
def watching_start(workers: Workers, join_timeout_s: float) -> Iterator[None]:
    """Report workers that end inside the block, while the ranks join. The joining ranks then raise PeerLostError."""
    joined = threading.Event()
    thread = threading.Thread(target=_watch, args=(workers, join_timeout_s, joined), name="watch workers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        joined.set()


def _watch(workers: Workers, join_timeout_s: float, joined: threading.Event) -> None:
    reported: set[int] = set()
    while not joined.wait(_LOOK_S):
        for rank, how in workers.ended().items():
            if rank not in reported:
                reported.add(rank)
                # Report in a thread: the report waits for rank 0, and rank 0 may wait for other ranks that have ended.
                threading.Thread(
                    target=_report, args=(workers, rank, how, join_timeout_s), name="report a worker", daemon=True
                ).start()


def _report(workers: Workers, rank: int, how: str, join_timeout_s: float) -> None:
    error = PeerLostError(f"its process {how} before it had joined the others; its own message is on stderr")
    with suppress(SarathiError, RuntimeError):
        report_refusal(error, workers.rank_environment(rank), join_timeout_s)
