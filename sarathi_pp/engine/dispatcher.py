"""Rank 0's driver of several replicas, which are whole pipelines that share the requests of a run.

It shares out input lines, collects answers, and gives the input lines of a lost replica to the others.

    Dispatcher.run --one DispatchedRun per call--> RemoteReplicas --> RowLedger
                                                        |
    [main thread: engine of replica 0]   [thread: share out]   [a thread per other replica: its messages]

RowLedger decides which replica gets an input line. The threads ask it, one at a time, and carry out its decision. The
leader of a replica is its first rank, which exchanges messages with rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.core.request_index import index_name
from sarathi_pp.engine.dispatched_run import LOOK_S, REACTION_S, DispatchedRun, LocalSink, LocalSource
from sarathi_pp.engine.engine import Engine
from sarathi_pp.engine.messages import Abort, Message, RequestError, Result, decode
from sarathi_pp.engine.progress import Progress, ReplicaProgress
from sarathi_pp.engine.remote_replicas import RemoteReplicas
from sarathi_pp.engine.row_ledger import RowLedger
from sarathi_pp.errors import MemoryLostError, PeerLostError, ProtocolError, SarathiError, StoppedError
from sarathi_pp.inputs.source import Source
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.process.signals import NEVER_ASKED, Asked, StopRequests
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.byte_stream import Remote

# Input lines that cannot run go to replica 0. If it is lost, this number of them is written to the sink at a time.
_REFUSED_ROWS = 64


class Dispatcher:
    """A driver of all replicas, with the methods of Engine: call `run` any number of times, then `close`.

    If a rank of a replica is lost, the whole replica is given up, and its requests run on the others. If no replica is
    left, `run` raises the error of the last one, now and in later calls. After any other exception, `run` may be called
    again.

    Args:
        engine: engine of replica 0. It reports its progress to `progress`.
        remotes: connections to the leaders of the other replicas, in order from replica 1.
        most: most requests that one replica may hold, running and waiting. See LoadBalancer.
        most_tokens: a replica that holds this number of prompt tokens gets no further request. See LoadBalancer.
        progress: adds up the progress of all replicas.
        routes: see LoadBalancer.
    """

    def __init__(
        self,
        engine: Engine,
        remotes: Sequence[Remote],
        most: int,
        most_tokens: int,
        progress: ReplicaProgress,
        clock: Clock,
        routes: PrefixRoutes | None = None,
    ) -> None:
        num_replicas = 1 + len(remotes)
        self._ledger = RowLedger(num_replicas, most, most_tokens, routes)
        self._replicas = RemoteReplicas(remotes, self._ledger, progress)
        self._clock = clock
        self._progress = progress
        self._engine = engine
        self._run: DispatchedRun | None = None  # the last run; None before the first call of `run`
        self._listeners = {
            replica: threading.Thread(
                target=self._listen, args=(replica,), name=f"messages of replica {replica}", daemon=True
            )
            for replica in self._replicas.remotes
        }
        for listener in self._listeners.values():
            listener.start()

    @property
    def lost(self) -> Mapping[int, SarathiError]:
        """The error because of which each lost replica was given up, by the replica's index."""
        return self._ledger.lost

    @property
    def is_lost(self) -> bool:
        """Return whether no replica is left."""
        return not self._ledger.has_replicas

    def run(self, source: Source, sink: Sink, stop: StopRequests = NEVER_ASKED) -> Asked | None:
        """Answer every input line of the source. See Engine.run."""
        self._run = DispatchedRun(self._replicas, self._clock, source, sink, stop)
        try:
            with self._run as run:
                return self._drive(run)
        except BaseException:
            self._abort()
            raise

    def report_progress(self) -> None:
        """Report the progress now. A new display needs the counts from before its run, to subtract them."""
        self._engine.report_progress()

    def close(self) -> None:
        """End all stages, and wait until the leader of each replica has said goodbye, which is its last message."""
        for replica in self._replicas.present:
            try:
                self._replicas.remotes[replica].outgoing.close()
            except SarathiError as error:
                self._replicas.lose(replica, error)
        if 0 not in self.lost:
            self._engine.close()
        for replica, listener in self._listeners.items():
            if replica not in self.lost:
                listener.join()

    def _drive(self, run: DispatchedRun) -> Asked | None:
        """Run replica 0's engine to the end of the run. If replica 0 is lost, wait for the other replicas instead."""
        source, sink = LocalSource(run), LocalSink(run)
        if 0 not in self.lost:
            try:
                return self._engine.run(source, sink, run)
            except (PeerLostError, MemoryLostError, ProtocolError) as error:
                # An error of the run's source or sink is not a loss of replica 0.
                if error is self._ledger.failure or not self._replicas.lose(0, error):
                    raise
        return self._drive_without_engine(run, source, sink)

    def _drive_without_engine(self, run: DispatchedRun, source: LocalSource, sink: LocalSink) -> Asked | None:
        """Wait until the other replicas have answered their requests. Meanwhile, write the lines that cannot run."""
        while True:
            stop = run.asked()
            for row in source.take(_REFUSED_ROWS):
                assert row.error is not None, "replica 0 is lost and gets no requests"
                sink.fail(row, row.error)
            if source.exhausted:
                return stop
            if stop is not None and self._clock.now() > stop.until_s:
                raise StoppedError.by(stop.number, f"the run, with {self._ledger.num_given} requests unfinished,")
            source.wait(LOOK_S)

    def _abort(self) -> None:
        """Forget every request, here and on the other replicas."""
        with self._replicas.changed:
            self._ledger.abort()
            self._replicas.changed.wait_for(lambda: not self._ledger.num_writing, REACTION_S)
        for thread in self._replicas.start_sending(Abort()):
            thread.join(REACTION_S)  # the replica must get the Abort before any request of the next run

    def _listen(self, replica: int) -> None:
        """Handle the messages of one replica's leader until it says goodbye."""
        remote = self._replicas.remotes[replica]
        try:
            while (text := remote.incoming.read()) is not None:
                self._handle(replica, decode(text))
            with self._replicas.changed:
                if self._ledger.num_held(replica) and not self._ledger.stopping:
                    raise PeerLostError(f"{remote.name} ended before it had answered all its requests")
                self._ledger.leave(replica)
                self._replicas.changed.notify_all()
        except SarathiError as error:
            self._replicas.lose(replica, error)
        except BaseException as error:  # LocalSource.take raises it in the main thread
            self._replicas.fail(error)

    def _handle(self, replica: int, message: Message) -> None:
        """Handle one message from the leader of a replica: its progress, or the end of a request."""
        if isinstance(message, Progress):
            self._progress.update(replica, message)
            return
        name = self._replicas.remotes[replica].name
        if not isinstance(message, (Result, RequestError)):
            raise ProtocolError(f"{name} sent a message of kind {type(message).__name__}, which only rank 0 may send")
        run = self._run
        if run is not None and run.write(replica, message):
            return
        if not self._ledger.may_be_late(replica, message.index):
            raise ProtocolError(
                f"{name} answered request {index_name(message.index)}, which rank 0 had not given to it"
            )
