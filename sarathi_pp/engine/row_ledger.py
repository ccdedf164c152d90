"""A record of which replica holds which input line of a run, and the choice of the next line to give to a replica.

    add -> waiting --give--+--> queue of replica 0 --take--> its engine --+--start_writing--> being written
              ^            +--> replica 1 ... ----------------------------+                         |
              `-------------------------- lose ---------------------------'                    end_writing

An input line is in exactly one place of this drawing. The lines of a lost replica wait before all others, in the order
in which the replica got them. All other lines keep the order in which they were added. A line that cannot run always
goes to replica 0's queue, because rank 0 writes its error line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.errors import SarathiError
from sarathi_pp.inputs.row import Row


class RowLedger:
    """A record of all input lines that wait, that a replica holds, or whose answers are being written.

    It has no thread, lock, clock or I/O. One thread at a time may call it.

    Args:
        most: most requests that one replica may hold, running and waiting. See LoadBalancer.
        most_tokens: a replica that holds this number of prompt tokens gets no further request. See LoadBalancer.
        routes: see LoadBalancer.

    Attributes:
        num_writing: number of input lines whose answers are being written to the sink.
        stopping: True if the run was asked to stop, so that no more input lines are given out.
        lost: the error of each lost replica, by its index.
        failure: the first error that ends the run early; None if there is none.
    """

    def __init__(self, num_replicas: int, most: int, most_tokens: int, routes: PrefixRoutes | None = None) -> None:
        self._balancer = LoadBalancer(num_replicas, most, most_tokens, routes)
        self._waiting: deque[Row] = deque()
        self._given: dict[int, Row] = {}  # by request index
        self._queue: deque[Row] = deque()  # given to replica 0 and not taken by its engine yet
        self._newest_given = -1  # request index
        self._newest_aborted = -1  # request index
        self.num_writing = 0
        self.stopping = False
        self.lost: dict[int, SarathiError] = {}
        self.failure: BaseException | None = None

    @property
    def has_replicas(self) -> bool:
        """Return whether a replica is left that can answer requests."""
        return bool(self._balancer.present)

    @property
    def room(self) -> int:
        """The number of further requests that all replicas together can take now."""
        return self._balancer.room

    @property
    def num_given(self) -> int:
        """The number of requests that replicas hold."""
        return len(self._given)

    @property
    def num_queued(self) -> int:
        """The number of input lines in replica 0's queue, which its engine has not taken yet."""
        return len(self._queue)

    @property
    def may_give(self) -> bool:
        """Return whether an input line waits for a replica, or could wait again if its replica is lost."""
        return bool(self._waiting) or (bool(self._given) and not self.stopping)

    @property
    def needs_only_replica_0(self) -> bool:
        """Return whether all input lines except those of replica 0 are in the sink."""
        elsewhere = len(self._given) - self._balancer.num_held(0)
        return not self._waiting and not elsewhere and not self.num_writing

    def num_held(self, replica: int) -> int:
        """Return the number of requests that a replica holds."""
        return self._balancer.num_held(replica)

    def add(self, rows: Iterable[Row]) -> None:
        """Add input lines to those that wait for a replica. After `stop` they are dropped."""
        if not self.stopping:
            self._waiting.extend(rows)

    def give(self) -> tuple[int, Row] | None:
        """Give the next input line to a replica.

        Returns:
            The index of the replica, and the line. None if no line waits, or no replica has room for it.
        """
        if not self._waiting:
            return None
        request, replica = self._waiting[0].request, 0
        if request is not None:
            if not self._balancer.room:
                return None
            replica = self._balancer.give(request)
            self._given[request.index] = self._waiting[0]
            self._newest_given = max(self._newest_given, request.index)
        row = self._waiting.popleft()
        if replica == 0:
            self._queue.append(row)
        return replica, row

    def take(self, limit: int) -> list[Row]:
        """Take up to `limit` input lines from the queue of replica 0."""
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def withdraw(self) -> None:
        """Drop the input lines of replica 0's queue, because its engine starts no more requests."""
        self._queue.clear()

    def start_writing(self, replica: int, index: int, num_output_tokens: int) -> Row | None:
        """Take the input line of a request that has ended, to write its answer.

        From now on the line is given to no other replica, even if this one is lost. Call `end_writing` after the answer
        is in the sink.

        Args:
            index: index of the request.

        Returns:
            The input line; None if the replica does not hold that request.
        """
        if not self._balancer.holds(replica, index):
            return None
        self._balancer.end(replica, index, num_output_tokens)
        self.num_writing += 1
        return self._given.pop(index)

    def end_writing(self) -> None:
        """Record that the sink has the answer to an input line that `start_writing` returned."""
        self.num_writing -= 1

    def may_be_late(self, replica: int, index: int) -> bool:
        """Return whether an answer to this request may still come from a replica that no longer holds it.

        It may have been on its way when the replica was lost, or when the requests were aborted.
        """
        return replica in self.lost or index <= self._newest_aborted

    def lose(self, replica: int, error: SarathiError) -> int | None:
        """Record that a replica was lost. The requests that it held wait again. After `stop` they are dropped.

        Returns:
            The number of these requests; None if the replica had already been lost.
        """
        if replica in self.lost:
            return None
        self.lost[replica] = error
        rows = self._remove(replica)
        if not self.stopping:
            self._waiting.extendleft(reversed(rows))
        if not self.has_replicas:
            self.fail(error)
        return len(rows)

    def leave(self, replica: int) -> None:
        """Record that a replica has ended in order. Drop the requests that it did not start."""
        assert self.stopping or not self.num_held(replica), "its requests would be lost"
        self._remove(replica)

    def _remove(self, replica: int) -> list[Row]:
        """Give no more requests to a replica. Remove the input lines that it held from the record, and return them."""
        rows = [self._given.pop(request.index) for request in self._balancer.lose(replica)]
        if replica == 0:
            self._queue = deque(row for row in self._queue if row.request is None)
        return rows

    def fail(self, error: BaseException) -> BaseException:
        """Record an error that ends the run. If there is an earlier one, keep that. Return the error that is kept."""
        if self.failure is None:
            self.failure = error
        return self.failure

    def stop(self) -> None:
        """Give no more input lines, and drop the waiting ones."""
        self.stopping = True
        self._waiting.clear()

    def abort(self) -> None:
        """Forget every input line, except those whose answers are being written.

        Forget the failure too, unless no replica is left.
        """
        self._newest_aborted = self._newest_given
        self._waiting.clear()
        self._given.clear()
        self._queue.clear()
        self._balancer.clear()
        if self.has_replicas:
            self.failure = None
