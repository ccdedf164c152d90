"""Several replicas with one source and one sink, and fake engines: every row is answered once."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from unittest.mock import Mock

import pytest
import torch

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.engine.dispatcher import Dispatcher
from sarathi_pp.engine.progress import Progress, ReplicaProgress
from sarathi_pp.engine.replica import AbortedError, RemoteSink, RemoteSource
from sarathi_pp.errors import OutputError, PeerLostError, RowError, StoppedError
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.process.signals import NEVER_ASKED, Asked
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.byte_stream import ByteStreamReceiver, ByteStreamSender, Remote
from sarathi_pp.wire.channel import QueueChannel
from tests.machine import patient

CLOCK = SystemClock()
pytestmark = pytest.mark.timeout(60)


def rows(count: int, *, arrival_s: float = 0.0, first: int = 0) -> list[Row]:
    made = []
    for index in range(first, first + count):
        request = Request(index, (1, 2, 3), SamplingParams(max_new_tokens=2, seed=0), arrival_s)
        made.append(Row(index + 1, f"id {index}", "own", request, arrival_s=arrival_s))
    return made


class Sink:
    """A sink that keeps which replica answered which row."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, str]] = []

    def finish(self, row: Row, completion: Completion, metrics: object) -> None:
        self.lines.append((row.id, str(completion.token_ids[0])))

    def fail(self, row: Row, error: RowError) -> None:
        self.lines.append((row.id, error.code))

    def close(self) -> None: ...

    def ids(self) -> list[object]:
        return sorted((id for id, _ in self.lines), key=str)


@dataclass
class Engine:
    """A fake engine that answers with its own number.

    It answers `a_turn` rows at a time, each in slow_s. After `dies_after` rows it loses a stage.
    """

    number: int = 0
    a_turn: int = 4
    dies_after: float = math.inf
    slow_s: float = 0.0
    answered: int = 0
    withdrawn: int = 0
    closed: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    last: object = None

    def run(self, source, sink, stop=NEVER_ASKED):
        while True:
            told = stop.asked()
            taken = [] if told is not None else source.take(self.a_turn)
            if told is not None:
                source.close()
            for row in taken:
                if row.error is not None:
                    sink.fail(row, row.error)
                    continue
                if self.answered >= self.dies_after:
                    raise PeerLostError(f"a stage of replica {self.number} died")
                self.begun.set()
                CLOCK.sleep(self.slow_s)
                self.last = row.request
                sink.finish(row, Completion(row.request, (self.number,), "length"), {"ttft_s": 0.5})
                self.answered += 1
            if not taken:
                if source.exhausted:
                    return told
                source.wait(0.05)

    def close(self):
        self.closed = True


class Leader:
    """Another replica: the runtime's own source and sink around a fake engine."""

    def __init__(self, engine: Engine, offset_s: float = 0.0) -> None:
        self.engine = engine
        self.down: QueueChannel[torch.Tensor] = QueueChannel(CLOCK, 8)
        self.up: QueueChannel[torch.Tensor] = QueueChannel(CLOCK, 8)
        self.remote = Remote(f"replica {engine.number}", ByteStreamSender(self.down), _Mortal(self.up, self))
        self.died: PeerLostError | None = None
        self.aborted = 0
        self._offset_s = offset_s
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        source, sink = (
            RemoteSource(ByteStreamReceiver(self.down), CLOCK, self._offset_s),
            RemoteSink(ByteStreamSender(self.up)),
        )
        try:
            while True:
                try:
                    self.engine.run(source, sink, source)
                    break
                except AbortedError:
                    self.aborted += 1
            sink.close()
        except PeerLostError as error:
            self.died = error


class _Mortal(ByteStreamReceiver):
    """The edge to a leader, which raises after the leader has died."""

    def __init__(self, channel: QueueChannel[torch.Tensor], leader: Leader) -> None:
        super().__init__(channel)
        self._leader = leader

    def read(self, timeout_s: float | None = None) -> bytes | None:
        while not self.ended:
            if (text := super().read(0.02)) is not None:
                return text
            if self._leader.died is not None:
                raise PeerLostError(f"{self._leader.remote.name} closed its connection")
        return None


def dispatcher(first: Engine, *others: Engine, most: int = 8, said: list[str] | None = None, seen=None, offset_s=0.0):
    leaders = [Leader(engine, offset_s) for engine in others]
    listener = Mock(
        report_progress=(seen if seen is not None else []).append, warn=(said if said is not None else []).append
    )
    progress = ReplicaProgress(1 + len(others), 2, listener)
    first.listener = progress.of_replica(0)
    made = Dispatcher(
        first,
        [leader.remote for leader in leaders],
        most,
        10**9,
        progress,
        CLOCK,
    )
    return made, leaders


def test_rows_are_shared_out_and_each_is_answered_once():
    sink, engines = Sink(), [Engine(number, slow_s=0.001) for number in range(3)]
    made, leaders = dispatcher(*engines)
    assert made.run(MemorySource(rows(100)), sink) is None
    made.close()
    assert sink.ids() == sorted((f"id {index}" for index in range(100)), key=str)
    assert all(engine.answered > 10 for engine in engines), [engine.answered for engine in engines]
    for leader in leaders:
        leader.thread.join(patient(10))
        assert not leader.thread.is_alive(), "the goodbye did not reach it"
    assert engines[0].closed and not made.lost


def test_a_slow_replica_is_given_less():
    sink, fast, slow = Sink(), Engine(0, slow_s=0.001), Engine(1, slow_s=0.05)
    made, _ = dispatcher(fast, slow, most=4)
    made.run(MemorySource(rows(80)), sink)
    assert len(sink.lines) == 80 and fast.answered > 3 * slow.answered


@pytest.mark.parametrize("dies_after", [0, 1, 7])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_replicas_rows_go_to_the_others(lost, dies_after):
    sink, said = Sink(), []
    engines = [Engine(number, slow_s=0.002) for number in range(3)]
    engines[lost].dies_after = dies_after
    made, _ = dispatcher(*engines, said=said)
    made.run(MemorySource(rows(90)), sink)
    made.close()
    assert sink.ids() == sorted((f"id {index}" for index in range(90)), key=str)
    assert list(made.lost) == [lost] and f"replica {lost} was lost" in said[0]
    assert engines[0].closed == (lost != 0)


def test_of_a_lost_replica_only_finished_requests_are_counted():
    seen = []
    progress = ReplicaProgress(2, 1, Mock(report_progress=seen.append))
    half = replace(Progress.nothing(1), running=2, waiting=3, prompt_tokens=10, output_tokens=5, tokens_computed=40)
    half = replace(half, stage_busy=(0.5,), kv_fragmentation=0.5)
    progress.update(1, half)
    progress.lose(1)
    progress.update(1, half)  # was on its way
    assert (seen[-1].running, seen[-1].waiting, seen[-1].tokens_computed) == (0, 0, 15)
    assert seen[-1].stage_busy == (0.0, 0.0) and seen[-1].kv_fragmentation is None


def test_where_all_are_lost_the_run_ends():
    engines = [Engine(number, slow_s=0.002, dies_after=5 * (1 + number)) for number in range(3)]
    made, _ = dispatcher(*engines)
    sink = Sink()
    with pytest.raises(PeerLostError):
        made.run(MemorySource(rows(90)), sink)
    assert len(set(sink.ids())) == len(sink.lines) < 90


def test_what_cannot_run_is_told_by_replica_0_and_still_when_that_is_lost():
    bad = [Row(index, f"bad {index}", "own", error=RowError("empty_prompt", "no")) for index in (1, 2)]
    for first in (Engine(0), Engine(0, dies_after=0)):
        sink = Sink()
        made, _ = dispatcher(first, Engine(1, slow_s=0.002))
        made.run(MemorySource([bad[0], *rows(20), bad[1]]), sink)
        assert sorted(id for id, answer in sink.lines if answer == "empty_prompt") == ["bad 1", "bad 2"]
        assert len(sink.lines) == 22


@pytest.mark.parametrize("finder", [0, 1])
@pytest.mark.parametrize("what", [OutputError("no space left"), PeerLostError("taken over by a later start")])
def test_what_the_sink_raises_ends_the_run_whoever_finds_out(finder, what):
    """An error of the sink is never taken for the loss of replica 0; then the other replicas would continue."""

    class Full(Sink):
        def finish(self, row, completion, metrics):
            if completion.token_ids == (finder,) and len(self.lines) > 6:
                raise what
            super().finish(row, completion, metrics)

    made, _ = dispatcher(Engine(0, slow_s=0.002), Engine(1, slow_s=0.002))
    with pytest.raises(type(what), match=str(what)):
        made.run(MemorySource(rows(200)), Full())
    assert not made.lost


def test_what_stops_the_reader_is_raised_once_the_rows_before_it_are_taken():
    class Torn(MemorySource):
        def take(self, limit):
            taken = super().take(limit)
            if not taken and limit:
                raise OSError("torn")
            return taken

        @property
        def exhausted(self):
            return False

    sink = Sink()
    made, _ = dispatcher(Engine(0), Engine(1))
    with pytest.raises(OSError, match="torn"):
        made.run(Torn(rows(12)), sink)


def test_told_to_stop_nothing_more_is_begun_anywhere_and_what_runs_is_finished():
    sink, engines = Sink(), [Engine(number, a_turn=2, slow_s=0.02) for number in range(3)]
    made, leaders = dispatcher(*engines, most=8)

    def asked() -> Asked | None:
        if all(engine.begun.is_set() for engine in engines):
            return Asked(15, CLOCK.now(), math.inf)
        return None

    class Endless(MemorySource):
        """A source like standard input that never closes; only the run can close it."""

        closed = False

        @property
        def exhausted(self):
            return self.closed

        def close(self):
            self.closed = True
            super().close()

    told = made.run(Endless(rows(1000)), sink, Mock(asked=asked))
    assert told is not None and told.number == 15
    assert len(sink.lines) == sum(engine.answered for engine in engines) < 100
    made.close()
    for leader in leaders:
        leader.thread.join(patient(10))
        assert not leader.thread.is_alive()
    assert not made.lost, "who stops as told is not lost"


def test_a_replica_that_goes_on_for_too_long_is_not_waited_for_without_end():
    sink, first, endless = Sink(), Engine(0, a_turn=1), Engine(1, a_turn=1, slow_s=30.0)
    made, _ = dispatcher(first, endless, most=4)
    asked_at = CLOCK.now() + 0.2

    def asked() -> Asked | None:
        return Asked(15, asked_at, asked_at + 0.5) if CLOCK.now() > asked_at and endless.begun.is_set() else None

    began_s = CLOCK.now()
    made.run(MemorySource(rows(50)), sink, Mock(asked=asked))
    assert CLOCK.now() - began_s < 15


def test_without_its_own_engine_rank_0_gives_up_when_the_time_for_stopping_is_over():
    sink, endless = Sink(), Engine(1, a_turn=1, slow_s=30.0)
    made, _ = dispatcher(Engine(0, dies_after=0), endless, most=4)

    def asked() -> Asked | None:
        return Asked(15, CLOCK.now(), CLOCK.now()) if endless.begun.is_set() and 0 in made.lost else None

    with pytest.raises(StoppedError, match="unfinished"):
        made.run(MemorySource(rows(50)), sink, Mock(asked=asked))


def test_it_runs_again_with_more_rows_also_without_the_replica_that_was_lost():
    engines = [Engine(0, slow_s=0.001, dies_after=15), Engine(1, slow_s=0.001)]
    made, _ = dispatcher(*engines)
    for _ in range(3):
        sink = Sink()
        made.run(MemorySource(rows(30)), sink)
        assert sink.ids() == sorted((f"id {index}" for index in range(30)), key=str)
    assert list(made.lost) == [0]


class FaultError(Exception):
    pass


@pytest.mark.parametrize("where", ["asked", "source", "sink of rank 0", "sink of another replica"])
def test_after_an_exception_no_replica_goes_on_with_what_was_asked_before(where):
    engines = [Engine(number, a_turn=2, slow_s=0.01) for number in range(3)]
    made, leaders = dispatcher(*engines)

    def fail(now: bool) -> None:
        if now and all(engine.begun.is_set() for engine in engines):
            raise FaultError(where)

    class Failing(MemorySource):
        def take(self, limit):
            fail(where == "source")
            return super().take(1)

    class FailingSink(Sink):
        def finish(self, row, completion, metrics):
            other = completion.token_ids != (0,)
            fail(where == ("sink of another replica" if other else "sink of rank 0"))
            super().finish(row, completion, metrics)

    for turn in range(2):
        with pytest.raises(FaultError, match=where):
            made.run(Failing(rows(2000, first=10000 * turn)), FailingSink(), Mock(asked=lambda: fail(where == "asked")))
        sink, answered = Sink(), [engine.answered for engine in engines]
        made.run(MemorySource(rows(60, first=10000 * turn + 5000)), sink)
        assert sink.ids() == sorted((f"id {10000 * turn + 5000 + index}" for index in range(60)), key=str)
        # Each replica may have been in the middle of a turn.
        assert sum(engine.answered for engine in engines) - sum(answered) <= 60 + 2 * len(engines)
    assert [leader.aborted for leader in leaders] == [2, 2] and not made.lost
    made.close()


def test_arrivals_are_told_in_the_leaders_own_time():
    sink, other = Sink(), Engine(1)
    made, _ = dispatcher(Engine(0, slow_s=0.01), other, offset_s=1000.0)
    made.run(MemorySource(rows(10, arrival_s=5.0)), sink)
    assert other.last.arrival_s == 5.0 - 1000.0
    assert len(sink.lines) == 10


def test_who_watches_sees_the_stages_of_all_replicas():
    seen: list[Progress] = []

    class Watched(Engine):
        def run(self, source, sink, stop=NEVER_ASKED):
            if hasattr(sink, "report_progress"):
                sink.report_progress(replace(Progress.nothing(2), running=7))
            return super().run(source, sink, stop)

    made, _ = dispatcher(Engine(0, slow_s=0.002), Watched(1), seen=seen)
    made.run(MemorySource(rows(60)), Sink())
    assert seen and seen[-1].running == 7 and len(seen[-1].stage_busy) == 4


def test_an_answer_that_is_being_written_when_its_replica_is_lost_is_written_once():
    """The sender to a leader and its listener detect the loss separately.

    In between, an answer may be on its way to disk.
    """
    writing, lost = threading.Event(), threading.Event()

    class Slow(Sink):
        def finish(self, row, completion, metrics):
            if completion.token_ids == (1,) and not writing.is_set():
                writing.set()
                assert lost.wait(patient(20))
            super().finish(row, completion, metrics)

    sink, first = Slow(), Engine(0, slow_s=0.002)
    made, _ = dispatcher(first, Engine(1, slow_s=0.002))

    def lose_it() -> None:
        assert writing.wait(patient(20))
        made._replicas.lose(1, PeerLostError("its edge broke"))
        lost.set()

    threading.Thread(target=lose_it, daemon=True).start()
    made.run(MemorySource(rows(60)), sink)
    assert sink.ids() == sorted((f"id {index}" for index in range(60)), key=str)


def test_a_replica_that_is_lost_when_all_is_answered_holds_nobody_up():
    class Late(Engine):
        """An engine that loses another replica between its last answer and its next look for rows."""

        def run(self, source, sink, stop=NEVER_ASKED):
            class Watched:
                @property
                def exhausted(self):
                    if source.exhausted:
                        made._replicas.lose(1, PeerLostError("its leader died"))
                    return source.exhausted

                def __getattr__(self, name):
                    return getattr(source, name)

            return super().run(Watched(), sink, stop)

    sink = Sink()
    made, _ = dispatcher(Late(0, slow_s=0.001), Engine(1, slow_s=0.001))
    made.run(MemorySource(rows(40)), sink)
    assert len(sink.lines) == 40 and list(made.lost) == [1]


def test_what_waits_for_room_keeps_its_order_when_a_replica_is_lost():
    class Wide(MemorySource):
        """A source that gives more rows than requested, as if a replica had been lost meanwhile."""

        def take(self, limit):
            return super().take(limit + 6)

    taken = []

    class Noting(Engine):
        def run(self, source, sink, stop=NEVER_ASKED):
            class Noted:
                def take(self, limit):
                    given = source.take(limit)
                    taken.extend(row.request.index for row in given)
                    return given

                def __getattr__(self, name):
                    return getattr(source, name)

            return super().run(Noted(), sink, stop)

    made, _ = dispatcher(Noting(0, a_turn=1), most=2)
    made.run(MemorySource(rows(0)), Sink())
    made.run(Wide(rows(30)), Sink())
    assert taken == sorted(taken) and len(taken) == 30
