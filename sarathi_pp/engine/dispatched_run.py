"""One run of several replicas: input lines go from the source to the replicas, and their answers to the sink.

    source -> [thread: share out] --+--> LocalSource -> engine of replica 0 -> LocalSink ---+--> sink
                                    +--Submit--> leader of replica 1 ... --Result--> write -+

The main thread runs replica 0's engine. The thread "share out" may live a little longer than its run. It gives out no
input line after the run has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from sarathi_pp.core.request import Completion
from sarathi_pp.core.request_index import index_name
from sarathi_pp.engine.messages import RequestError, Result, Stop, Submit
from sarathi_pp.engine.remote_replicas import RemoteReplicas
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import Source
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.process.signals import Asked, StopRequests
from sarathi_pp.trace.clock import Clock

# Seconds between two checks of rank 0 for events that wake no thread: new input lines, a signal, its deadline.
LOOK_S = 0.05
# Most seconds that rank 0 waits until another replica or thread reacts to a message.
REACTION_S = 2.0


class DispatchedRun:
    """A run whose thread shares out the source's input lines to the replicas while the `with` block runs.

    Args:
        replicas: connections to the other replicas, and the ledger of the input lines that each replica holds.
        source: gives the input lines.
        sink: receives the answers of all replicas.
        stop: shows whether, and when, the run was asked to stop.
    """

    def __init__(
        self,
        replicas: RemoteReplicas,
        clock: Clock,
        source: Source,
        sink: Sink,
        stop: StopRequests,
    ) -> None:
        self.replicas = replicas
        self._ledger = replicas.ledger
        self._changed = replicas.changed
        self._clock = clock
        self._source = source
        self._sink = sink
        self._requests = stop
        self._stop: Asked | None = None
        self._all_read = False
        self._ended = False
        self._thread = threading.Thread(target=self._share_out, name="share out", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. If it is blocked by a send to a replica that hangs, it ends when that send returns."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(REACTION_S)

    def is_over(self) -> bool:
        """Return whether replica 0 gets no more input lines. The caller holds the ledger's lock, `replicas.changed`."""
        if self._stop is not None and self._clock.now() > self._stop.until_s + REACTION_S:
            return True
        return self._all_read and self._ledger.needs_only_replica_0

    def asked(self) -> Asked | None:
        """Return the signal that stops the run; None if none has come.

        The first call after a signal also closes the source and sends Stop to the other replicas. After that, no
        replica starts another request.
        """
        stop = self._requests.asked()
        # A second signal brings an earlier deadline, which the replicas must get too.
        if stop is not None and (self._stop is None or stop.until_s != self._stop.until_s):
            with self._changed:
                self._stop = stop
                self._ledger.stop()
                self._source.close()
                self._changed.notify_all()
            left_s = stop.until_s - self._clock.now()
            self.replicas.start_sending(Stop(stop.number, max(0.0, left_s) if left_s < float("inf") else None))
        return stop

    def write(self, replica: int, message: Result | RequestError) -> bool:
        """Write an answer that came from another replica to the sink.

        Args:
            replica: index of the replica, from 1.

        Returns:
            False if the ledger does not record that this replica holds the request. Nothing is written then.
        """
        num_tokens = len(message.token_ids) if isinstance(message, Result) else 0
        with self.writing(replica, message.index, num_tokens) as row:
            if row is None:
                return False
            assert row.request is not None
            # An error of the sink, such as a full disk, is not the replica's fault. `calling_sink` records it as the
            # end of the run, and the main thread raises it.
            with suppress(Exception), self.calling_sink() as sink:
                if isinstance(message, Result):
                    sink.finish(row, message.completion(row.request), message.metrics)
                else:
                    sink.fail(row, message.error)
        return True

    @contextmanager
    def writing(self, replica: int, index: int, num_output_tokens: int) -> Iterator[Row | None]:
        """Yield the input line of a request that has ended; None if the replica does not hold the request.

        Inside the block no other replica can get the input line, and the run does not end.

        Args:
            replica: index of the replica, from 0.
            index: index of the request.
            num_output_tokens: number of tokens in the answer; 0 for an error.
        """
        with self._changed:
            row = self._ledger.start_writing(replica, index, num_output_tokens)
        try:
            yield row
        finally:
            if row is not None:
                with self._changed:
                    self._ledger.end_writing()
                    self._changed.notify_all()

    @contextmanager
    def calling_sink(self) -> Iterator[Sink]:
        """Yield the sink, for a call of one of its methods. If the call raises an error, the run ends.

        The error that then leaves the block is the first one of the run, which another thread may have caused.
        """
        try:
            yield self._sink
        except Exception as error:
            raise self.replicas.fail(error) from None

    def _share_out(self) -> None:
        """Give input lines to replicas until none is left, and send those of other replicas to them."""
        try:
            while (given := self._next_given()) is not None:
                replica, row = given
                if replica and row.request is not None:
                    self.replicas.send(replica, Submit(row.request))
        except BaseException as error:  # LocalSource.take raises it in the main thread
            self.replicas.fail(error)

    def _next_given(self) -> tuple[int, Row] | None:
        """Give the next input line to a replica. Wait until there is a line, and a replica with room for it.

        Returns:
            The index of the replica, and the line. None if the run has ended, or if no line is left and none can come
            back because its replica is lost.
        """
        while True:
            with self._changed:
                if self._ended or self._ledger.failure is not None:
                    return None
                if (given := self._ledger.give()) is not None:
                    self._changed.notify_all()
                    return given
                if not self._all_read and self._source.exhausted:
                    self._all_read = True
                    self._changed.notify_all()
                if self._all_read and not self._ledger.may_give:
                    return None
                room = 0 if self._all_read else self._ledger.room
                if not room:
                    self._changed.wait(LOOK_S)
            if room:
                self._read(room)

    def _read(self, limit: int) -> None:
        """Move up to `limit` input lines from the source to the ledger. If there are none yet, wait a moment."""
        if rows := self._source.take(limit):
            with self._changed:
                if not self._ended:
                    self._ledger.add(rows)
        else:
            self._source.wait(LOOK_S)


class LocalSource:
    """The source of replica 0's engine: the input lines that this run gave to replica 0. See Source."""

    def __init__(self, run: DispatchedRun) -> None:
        self._run = run
        self._ledger = run.replicas.ledger
        self._changed = run.replicas.changed

    @property
    def exhausted(self) -> bool:
        with self._changed:
            return not self._ledger.num_queued and self._ledger.failure is None and self._run.is_over()

    def take(self, limit: int) -> list[Row]:
        with self._changed:
            if self._ledger.failure is not None and not self._ledger.num_queued:
                raise self._ledger.failure
            return self._ledger.take(limit)

    def wait(self, timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._ledger.num_queued or self._ledger.failure or self._run.is_over(), timeout_s
            )

    def close(self) -> None:
        with self._changed:
            self._ledger.withdraw()


class LocalSink:
    """The sink of replica 0's engine. It passes answers on to the sink of the run. See Sink."""

    def __init__(self, run: DispatchedRun) -> None:
        self._run = run

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        assert row.request is not None
        with self._run.writing(0, row.request.index, len(completion.token_ids)) as given:
            assert given is row, f"replica 0 does not hold request {index_name(row.request.index)}"
            with self._run.calling_sink() as sink:
                sink.finish(row, completion, metrics)

    def fail(self, row: Row, error: RowError) -> None:
        if row.request is None:
            with self._run.calling_sink() as sink:
                sink.fail(row, error)
            return
        with self._run.writing(0, row.request.index, 0) as given:
            assert given is row, f"replica 0 does not hold request {index_name(row.request.index)}"
            with self._run.calling_sink() as sink:
                sink.fail(row, error)

    def close(self) -> None:
        """Do nothing, because the other replicas still use the sink of the run."""
