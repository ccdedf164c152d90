"""Rank 0's driver of several replicas: shares rows out, takes answers in, gives a lost replica's rows to the others.

    source --rows--> Dispatcher --+--> queue --> engine of replica 0, on this rank --.
                                  |                                                  +--> sink
                                  +--Submit--> leader of replica 1 ... ----Result----'

The main thread runs replica 0's engine, as it would without others. One thread shares rows out, and one for each other
replica takes in what its leader says. A row is in exactly one place: shared out to one replica, or on its way there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.request import Completion
from sarathi_pp.engine.engine import Engine
from sarathi_pp.engine.messages import Abort, RequestError, Result, Stop, Submit, decode, encode
from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import MemoryLostError, PeerLostError, ProtocolError, RowError, SarathiError, StoppedError
from sarathi_pp.inputs.parse import Row
from sarathi_pp.inputs.source import Source
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.process.signals import Asked
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.byte_stream import Remote

# How often rank 0 looks for what nobody tells it of: rows that arrive, a signal, the end of what a stop allows.
_LOOK_S = 0.05
# For a replica that was told to stop to say how far it came.
_ECHO_S = 2.0


class Dispatcher:
    """Use as an Engine: `run` as often as there are rows, `close` once.

    make_engine: replica 0's, given whom it tells how far it is. most, most_tokens: see LoadBalancer. A replica
    whose stages, or whose leader, are lost, is given up, and its requests run elsewhere; PeerLostError where no other
    is left.
    After any other exception of `run` the next call begins anew.
    """

    def __init__(
        self,
        make_engine: Callable[[Callable[[Progress], None]], Engine],
        remotes: Sequence[Remote],
        most: int,
        most_tokens: int,
        num_stages: int,
        clock: Clock,
        *,
        on_progress: Callable[[Progress], None],
        warn: Callable[[str], None],
    ) -> None:
        self._remotes = {replica: remote for replica, remote in enumerate(remotes, start=1)}
        self._clock = clock
        self._on_progress = on_progress
        self._watched = threading.Lock()
        self._progress = [Progress.nothing(num_stages)] * (1 + len(remotes))
        self._engine = make_engine(partial(self._report_progress, 0))
        self._warn = warn
        self._changed = threading.Condition()
        self._balancer = LoadBalancer(1 + len(remotes), most, most_tokens)
        self._rows: dict[int, Row] = {}  # shared out, by request
        self._returned: deque[Row] = deque()  # by a lost replica; they go first
        self._local: deque[Row] = deque()  # for replica 0's engine
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._runs = 0
        self._newest = -1  # index of the newest request that was given to a replica
        self._aborted = -1  # answers to requests up to this index are dropped
        self._shared_out = False
        self._writing = 0  # rows that have ended and are on their way into the sink
        self._stopped: Asked | None = None
        self._failure: BaseException | None = None
        self._lost: dict[int, SarathiError] = {}
        self._listeners = [
            threading.Thread(target=self._listen, args=(replica,), name=f"answers of replica {replica}", daemon=True)
            for replica in self._remotes
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def lost(self) -> Mapping[int, SarathiError]:
        """Replicas that were given up, and why."""
        return self._lost

    def run(self, source: Source, sink: Sink, asked: Callable[[], Asked | None] = lambda: None) -> Asked | None:
        """See Engine.run."""
        with self._changed:
            self._source, self._sink, self._shared_out = source, sink, False
            self._runs += 1
        sharing = threading.Thread(target=self._share_out, args=(self._runs,), name="share out", daemon=True)
        sharing.start()

        def heard() -> Asked | None:
            told = asked()
            if told is not None:
                self._stop(told)
            return told

        try:
            if 0 in self._lost:
                return self._watch_over(heard)
            try:
                return self._engine.run(_LocalSource(self), _LocalSink(self), heard)
            except (PeerLostError, MemoryLostError, ProtocolError) as error:
                if error is self._failure or not self._lose(0, error):
                    raise  # the sink's or the source's, and no fault of the replica
                return self._watch_over(heard)
        except BaseException:
            self._abort(sharing)
            raise
        finally:
            self._end_sharing(sharing)

    @property
    def is_lost(self) -> bool:
        """Whether no replica is left."""
        return not self._balancer.present

    def _end_sharing(self, sharing: threading.Thread) -> None:
        with self._changed:
            self._shared_out = True
            self._changed.notify_all()
        sharing.join(_ECHO_S)  # longer where a replica hangs that takes nothing more

    def _abort(self, sharing: threading.Thread) -> None:
        """Forget every request, here and on the other replicas."""
        self._end_sharing(sharing)
        with self._changed:
            self._runs += 1  # should the thread still hold rows, it drops them
            self._aborted = self._newest
            for rows in (self._rows, self._returned, self._local):
                rows.clear()
            self._balancer.clear()
            if self._balancer.present:
                self._failure = None
            self._changed.wait_for(lambda: not self._writing, _ECHO_S)
        telling = [self._start_telling(replica, Abort()) for replica in self._remotes if replica not in self._lost]
        for thread in telling:
            thread.join(_ECHO_S)  # before anything else is written to that replica

    def close(self) -> None:
        """Send all stages home, and wait until the leaders have said goodbye."""
        for replica, remote in self._remotes.items():
            if replica not in self._lost:
                try:
                    remote.outgoing.close()
                except SarathiError as error:
                    self._lose(replica, error)
        if 0 not in self._lost:
            self._engine.close()
        for replica, listener in zip(self._remotes, self._listeners, strict=True):
            if replica not in self._lost:
                listener.join()

    # What follows is called by replica 0's engine, in the main thread.

    def take(self, limit: int) -> list[Row]:
        with self._changed:
            if self._failure is not None and not self._local:
                raise self._failure
            return [self._local.popleft() for _ in range(min(limit, len(self._local)))]

    def wait(self, timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._local or self._failure or self._is_over(), timeout_s)

    def is_exhausted(self) -> bool:
        with self._changed:
            return not self._local and self._failure is None and self._is_over()

    def finish(self, replica: int, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        """Replica 0's engine answers."""
        assert self._sink is not None and row.request is not None
        with self._ending(replica, row.request.index, len(completion.token_ids)), self._failing():
            self._sink.finish(row, completion, metrics)

    def fail(self, replica: int, row: Row, error: RowError) -> None:
        """A request of replica 0's, or a row that could not run and was never shared out."""
        assert self._sink is not None
        if row.request is None:
            with self._failing():
                self._sink.fail(row, error)
            return
        with self._ending(replica, row.request.index, 0), self._failing():
            self._sink.fail(row, error)

    def withdraw(self) -> None:
        """Replica 0's engine begins nothing more."""
        with self._changed:
            self._local.clear()

    # And this by any thread.

    @contextmanager
    def _ending(self, replica: int, index: int, num_output_tokens: int) -> Iterator[Row | None]:
        """While inside, its line is written; None where that replica does not hold it (any more).

        From here on nobody gives it to another replica, and until the end of it nobody closes the sink.
        """
        with self._changed:
            row = self._rows.pop(index) if self._balancer.holds(replica, index) else None
            if row is not None:
                self._balancer.end(replica, index, num_output_tokens)
            self._writing += 1
        try:
            yield row
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """While inside, the sink is called by replica 0's engine: what it raises is the run's failure."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            assert self._failure is not None
            raise self._failure from None

    def _is_over(self) -> bool:
        """Nothing more is to be answered. With the lock held."""
        told = self._stopped
        if told is not None and self._clock.now() > told.until_s + _ECHO_S:
            return True
        elsewhere = any(map(self._balancer.num_held, self._remotes))
        return self._shared_out and not self._returned and not elsewhere and not self._writing

    def _watch_over(self, heard: Callable[[], Asked | None]) -> Asked | None:
        """Without an engine of its own: until the other replicas have answered everything. Returns as Engine.run."""
        while True:
            told = heard()
            for row in self.take(len(self._local) or 1):
                assert row.error is not None, "replica 0 is given no requests any more"
                self.fail(0, row, row.error)
            if self.is_exhausted():
                return told
            if told is not None and self._clock.now() > told.until_s:
                raise StoppedError.by(told.number, f"the run, with {len(self._rows)} requests unfinished,")
            self.wait(_LOOK_S)

    def _stop(self, told: Asked) -> None:
        """Begin nothing more anywhere. The last word counts."""
        with self._changed:
            if self._stopped is not None and told.until_s == self._stopped.until_s:
                return
            self._stopped = told
            self._returned.clear()
            assert self._source is not None
            self._source.close()
            self._changed.notify_all()
        left_s = told.until_s - self._clock.now()
        stop = Stop(told.number, max(0.0, left_s) if left_s < float("inf") else None)
        for replica in self._remotes:
            if replica not in self._lost:
                self._start_telling(replica, stop)

    def _start_telling(self, replica: int, message: Stop | Abort) -> threading.Thread:
        """In a thread: a replica that takes nothing any more must not keep this one from finishing its own."""
        thread = threading.Thread(
            target=self._tell, args=(replica, encode(message)), name="tell a replica", daemon=True
        )
        thread.start()
        return thread

    def _share_out(self, run: int) -> None:
        """run: its number; what an earlier one has left behind ends."""
        try:
            while (rows := self._next_rows(run)) is not None:
                for number, row in enumerate(rows):
                    if not self._give(row, run):
                        with self._changed:
                            self._returned.extendleft(reversed(rows[number:]))
                        break
        except BaseException as error:  # raised by take, in the thread that can do something about it
            self._fail(error)

    def _next_rows(self, run: int) -> list[Row] | None:
        """Rows for which there is room, waited for; None once there are none left and none can come back."""
        source = self._source
        assert source is not None
        while True:
            with self._changed:
                if self._shared_out or self._failure is not None or run != self._runs:
                    return None
                room = self._balancer.room
                if room and self._returned:
                    return [self._returned.popleft() for _ in range(min(room, len(self._returned)))]
                exhausted = source.exhausted
                # What is not answered yet may come back.
                if exhausted and not self._returned and not (self._rows and self._stopped is None):
                    self._shared_out = True
                    self._changed.notify_all()
                    return None
                if not room or exhausted:
                    self._changed.wait(_LOOK_S)
                    continue
            if rows := source.take(room):
                return rows
            source.wait(_LOOK_S)

    def _give(self, row: Row, run: int) -> bool:
        """To the replica that has least to do; False where none has room, since one was lost.

        What cannot run is replica 0's to tell, whose trace counts it.
        """
        request = row.request
        with self._changed:
            if self._stopped is not None or run != self._runs:
                return True  # it waits for another run, or its own has ended
            replica = 0
            if request is not None:
                if not self._balancer.room:
                    return False
                replica = self._balancer.give(request)
                self._rows[request.index] = row
                self._newest = max(self._newest, request.index)
            if replica == 0:
                self._local.append(row)
                self._changed.notify_all()
                return True
        assert request is not None
        self._tell(replica, encode(Submit(request)))
        return True

    def _tell(self, replica: int, text: bytes) -> None:
        try:
            self._remotes[replica].outgoing.write(text)
        except SarathiError as error:
            self._lose(replica, error)

    def _listen(self, replica: int) -> None:
        """What one leader says, until its goodbye."""
        answers = self._remotes[replica].incoming
        try:
            while (text := answers.read()) is not None:
                self._hear(replica, text)
            with self._changed:
                if self._balancer.num_held(replica) and self._stopped is None:
                    raise PeerLostError(f"{self._remotes[replica].name} left with requests unfinished")
                # Told to stop, it has ended as it should, and what it had not begun waits for another run.
                for request in self._balancer.lose(replica):
                    del self._rows[request.index]
                self._changed.notify_all()
        except SarathiError as error:
            self._lose(replica, error)
        except BaseException as error:  # the sink's: raised by take, as it would be by the engine
            self._fail(error)

    def _hear(self, replica: int, text: bytes) -> None:
        message = decode(text)
        if isinstance(message, Progress):
            self._report_progress(replica, message)
            return
        name = self._remotes[replica].name
        if not isinstance(message, (Result, RequestError)):
            raise ProtocolError(f"a {type(message).__name__} from {name}")
        num_tokens = len(message.token_ids) if isinstance(message, Result) else 0
        with self._ending(replica, message.index, num_tokens) as row:
            if row is None:
                if replica in self._lost or message.index <= self._aborted:
                    return  # somebody else has it by now, or nobody wants it any more
                raise ProtocolError(f"{name} answers request {message.index}, which it was not given")
            assert row.request is not None and self._sink is not None
            try:
                if isinstance(message, Result):
                    self._sink.finish(row, message.completion(row.request), message.metrics)
                else:
                    self._sink.fail(row, message.error)
            except Exception as error:  # the sink's, and no fault of the replica's, which is still listened to
                self._fail(error)

    def _lose(self, replica: int, error: SarathiError) -> bool:
        """Its requests go back to those that wait; False where no replica is left that could run them: the run ends."""
        with self._changed:
            if replica in self._lost:
                return bool(self._balancer.present)
            self._lost[replica] = error
            requests = self._balancer.lose(replica)
            rows = [self._rows.pop(request.index) for request in requests]
            if replica == 0:
                kept = [row for row in self._local if row.request is None]
                self._local.clear()
                self._local.extend(kept)
            goes_on = self._stopped is None
            if goes_on:
                self._returned.extendleft(reversed(rows))
            left = bool(self._balancer.present)
            if not left and self._failure is None:
                self._failure = error
            self._changed.notify_all()
        if left:
            become = "go to the other replicas" if goes_on else "wait for --resume, since the run was told to stop"
            self._warn(f"replica {replica} was lost: {error}; its {len(rows)} unfinished requests {become}")
        return left

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _report_progress(self, replica: int, progress: Progress) -> None:
        """Report the progress of all replicas after one has reported its own."""
        with self._watched:
            self._progress[replica] = progress
            self._on_progress(Progress.of_replicas(self._progress))


class _LocalSource:
    """Replica 0's part of the rows, as its engine wants them. See Source."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def exhausted(self) -> bool:
        return self._dispatcher.is_exhausted()

    def take(self, limit: int) -> list[Row]:
        return self._dispatcher.take(limit)

    def wait(self, timeout_s: float | None) -> None:
        self._dispatcher.wait(timeout_s)

    def close(self) -> None:
        self._dispatcher.withdraw()


class _LocalSink:
    """What replica 0 answers. See Sink."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        self._dispatcher.finish(0, row, completion, metrics)

    def fail(self, row: Row, error: RowError) -> None:
        self._dispatcher.fail(0, row, error)

    def close(self) -> None:
        """The dispatcher's own stays open."""
