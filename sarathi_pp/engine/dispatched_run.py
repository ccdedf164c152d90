"""One run that several replicas answer, from its source to its sink.

    source -> [thread: share out] --+--> LocalSource -> engine of replica 0 -> LocalSink ---+--> sink
                                    +--Submit--> leader of replica 1 ... --Result--> write -+

The main thread runs replica 0's engine. A run that has ended gives out no input line, even if its thread ends later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from sarathi_pp.core.request import Completion
from sarathi_pp.engine.messages import RequestError, Result, Stop, Submit
from sarathi_pp.engine.remote_replicas import RemoteReplicas
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import Source
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.process.signals import Asked, StopRequests
from sarathi_pp.trace.clock import Clock

# How often rank 0 checks for events without a notification: new input lines, a signal, the deadline of a stop.
LOOK_S = 0.05
# How long rank 0 waits for another replica or thread to react to a message.
REACTION_S = 2.0


class DispatchedRun:
    """A run that shares out the source's input lines while its `with` block runs.

    Args:
        stop: see Engine.run.
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
        """End the thread. If a replica that hangs blocks the thread, it ends when its call returns."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(REACTION_S)

    def is_over(self) -> bool:
        """Return whether replica 0 gets no more input lines. Call it with the lock held."""
        if self._stop is not None and self._clock.now() > self._stop.until_s + REACTION_S:
            return True
        return self._all_read and self._ledger.needs_only_replica_0

    def asked(self) -> Asked | None:
        """Return the signal that stops the run; None if there was none. No replica starts a request after it."""
        stop = self._requests.asked()
        # The deadline of the last signal counts.
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
        """Write the answer of another replica to the sink. Return False if that replica does not hold the request."""
        num_tokens = len(message.token_ids) if isinstance(message, Result) else 0
        with self.writing(replica, message.index, num_tokens) as row:
            if row is None:
                return False
            assert row.request is not None
            # An error of the sink is not the replica's fault. The main thread raises it.
            with suppress(Exception), self.calling_sink() as sink:
                if isinstance(message, Result):
                    sink.finish(row, message.completion(row.request), message.metrics)
                else:
                    sink.fail(row, message.error)
        return True

    @contextmanager
    def writing(self, replica: int, index: int, num_output_tokens: int) -> Iterator[Row | None]:
        """Yield the input line of a request that has ended; None if the replica does not hold it.

        Inside the block no other replica can get the input line, and the run does not end.
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
        """Yield the sink. An error inside the block ends the run. The block raises the run's first error."""
        try:
            yield self._sink
        except Exception as error:
            raise self.replicas.fail(error) from None

    def _share_out(self) -> None:
        try:
            while (given := self._next_given()) is not None:
                replica, row = given
                if replica and row.request is not None:
                    self.replicas.send(replica, Submit(row.request))
        except BaseException as error:  # LocalSource.take raises it in the main thread
            self.replicas.fail(error)

    def _next_given(self) -> tuple[int, Row] | None:
        """Give an input line to a replica and return both. Wait for an input line and for room.

        Returns:
            None if no input line is left, and no lost replica can return one.
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
        if rows := self._source.take(limit):
            with self._changed:
                if not self._ended:
                    self._ledger.add(rows)
        else:
            self._source.wait(LOOK_S)


class LocalSource:
    """The input lines of replica 0, for its engine in the main thread. See Source."""

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
    """The sink of replica 0's engine. See Sink."""

    def __init__(self, run: DispatchedRun) -> None:
        self._run = run

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        assert row.request is not None
        with self._run.writing(0, row.request.index, len(completion.token_ids)) as given:
            assert given is row, f"replica 0 does not hold request {row.request.index}"
            with self._run.calling_sink() as sink:
                sink.finish(row, completion, metrics)

    def fail(self, row: Row, error: RowError) -> None:
        if row.request is None:
            with self._run.calling_sink() as sink:
                sink.fail(row, error)
            return
        with self._run.writing(0, row.request.index, 0) as given:
            assert given is row, f"replica 0 does not hold request {row.request.index}"
            with self._run.calling_sink() as sink:
                sink.fail(row, error)

    def close(self) -> None:
        """Do nothing: the run's sink stays open."""
