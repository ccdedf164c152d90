"""Rank 0's connections to the other replicas, and the ledger of the input lines of all replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sarathi_pp.engine.messages import Abort, Stop, Submit, encode
from sarathi_pp.engine.progress import RunListener
from sarathi_pp.engine.row_ledger import RowLedger
from sarathi_pp.errors import SarathiError
from sarathi_pp.wire.byte_stream import Remote


class RemoteReplicas:
    """The leaders of replicas 1, 2, ..., and the ledger that all threads share.

    Args:
        remotes: connections to the leaders.
        listener: receives a warning if a replica is lost.
    """

    def __init__(self, remotes: Sequence[Remote], ledger: RowLedger, listener: RunListener) -> None:
        self.remotes = dict(enumerate(remotes, start=1))
        self.ledger = ledger
        self.changed = threading.Condition()  # guards the ledger
        self._listener = listener

    @property
    def present(self) -> list[int]:
        """The other replicas that are not lost."""
        return [replica for replica in self.remotes if replica not in self.ledger.lost]

    def send(self, replica: int, message: Submit | Stop | Abort) -> None:
        """Send a message to a leader. If that fails, the replica is lost."""
        try:
            self.remotes[replica].outgoing.write(encode(message))
        except SarathiError as error:
            self.lose(replica, error)

    def start_sending(self, message: Stop | Abort) -> list[threading.Thread]:
        """Send a message to all leaders, each in a thread, so that a leader that hangs does not delay the others."""
        threads = [
            threading.Thread(target=self.send, args=(replica, message), name=f"send to replica {replica}", daemon=True)
            for replica in self.present
        ]
        for thread in threads:
            thread.start()
        return threads

    def lose(self, replica: int, error: SarathiError) -> bool:
        """Return the requests of a lost replica to those that wait.

        Returns:
            True if a replica is left that can run them. Otherwise the run fails with the error.
        """
        with self.changed:
            num_rows = self.ledger.lose(replica, error)
            stopping, has_replicas = self.ledger.stopping, self.ledger.has_replicas
            self.changed.notify_all()
        if num_rows is not None and has_replicas:
            become = "wait for --resume, because a signal stops the run" if stopping else "go to the other replicas"
            self._listener.warn(f"replica {replica} was lost: {error}; its {num_rows} unfinished requests {become}")
        return has_replicas

    def fail(self, error: BaseException) -> BaseException:
        """End the run with this error, unless there is one already. Return the first error."""
        with self.changed:
            first = self.ledger.fail(error)
            self.changed.notify_all()
            return first
