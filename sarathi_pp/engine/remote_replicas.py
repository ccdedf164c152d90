"""Rank 0's connections to the other replicas, and the ledger of the input lines of all replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sarathi_pp.engine.messages import Abort, Stop, Submit, encode
from sarathi_pp.engine.progress import ReplicaProgress
from sarathi_pp.engine.row_ledger import RowLedger
from sarathi_pp.errors import SarathiError
from sarathi_pp.wire.byte_stream import Remote


class RemoteReplicas:
    """The connections to the leaders (first ranks) of replicas 1, 2, ..., and the ledger that all threads share.

    Args:
        remotes: connections to the leaders, in order from replica 1.
        ledger: the record of which replica holds which input line.
        progress: the progress of all replicas. Its listener receives a warning if a replica is lost.

    Attributes:
        remotes: the connections by index of the replica.
        changed: its lock guards the ledger. Threads wait on it for a change of the ledger.
    """

    def __init__(self, remotes: Sequence[Remote], ledger: RowLedger, progress: ReplicaProgress) -> None:
        self.remotes = dict(enumerate(remotes, start=1))
        self.ledger = ledger
        self.changed = threading.Condition()
        self._progress = progress

    @property
    def present(self) -> list[int]:
        """The indexes of the replicas that are not lost, without replica 0."""
        return [replica for replica in self.remotes if replica not in self.ledger.lost]

    def send(self, replica: int, message: Submit | Stop | Abort) -> None:
        """Send a message to the leader of a replica. If sending fails, the replica counts as lost."""
        try:
            self.remotes[replica].outgoing.write(encode(message))
        except SarathiError as error:
            self.lose(replica, error)

    def start_sending(self, message: Stop | Abort) -> list[threading.Thread]:
        """Send a message to all leaders, each in a thread, so that a leader that hangs does not delay the others.

        Returns:
            The threads, which may still be sending.
        """
        threads = [
            threading.Thread(target=self.send, args=(replica, message), name=f"send to replica {replica}", daemon=True)
            for replica in self.present
        ]
        for thread in threads:
            thread.start()
        return threads

    def lose(self, replica: int, error: SarathiError) -> bool:
        """Record that a replica was lost. Its unfinished requests wait again, for another replica.

        Returns:
            True if another replica is left. Otherwise the run fails with `error`.
        """
        with self.changed:
            num_rows = self.ledger.lose(replica, error)
            stopping, has_replicas = self.ledger.stopping, self.ledger.has_replicas
            self.changed.notify_all()
        self._progress.lose(replica)
        if num_rows is not None and has_replicas:
            become = "wait for --resume, because a signal stops the run" if stopping else "go to the other replicas"
            self._progress.listener.warn(
                f"replica {replica} was lost: {error}; its {num_rows} unfinished requests {become}"
            )
        return has_replicas

    def fail(self, error: BaseException) -> BaseException:
        """End the run with an error. If an earlier error has already ended it, that one counts.

        Returns:
            The error that counts.
        """
        with self.changed:
            first = self.ledger.fail(error)
            self.changed.notify_all()
            return first
