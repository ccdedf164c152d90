"""Every row is answered once while a replica is left, for any order of events."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarathi_pp.core.request import Request
from sarathi_pp.engine.row_ledger import RowLedger
from sarathi_pp.errors import PeerLostError, RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams

MOST, MOST_TOKENS = 3, 40


def request_row(index: int, num_tokens: int = 5) -> Row:
    return Row(index + 1, index, "own", Request(index, (1,) * num_tokens, SamplingParams(seed=0)))


def refused_row(index: int) -> Row:
    return Row(index + 1, index, "own", error=RowError("empty_prompt", "no"))


def give_all(ledger: RowLedger) -> list[tuple[int, int]]:
    """Give rows until none can be given; return the replica and index of each."""
    given = []
    while (one := ledger.give()) is not None:
        given.append((one[0], one[1].line - 1))
    return given


def test_rows_of_a_lost_replica_go_first_and_in_the_order_in_which_it_got_them():
    ledger = RowLedger(2, MOST, 10**9)
    ledger.add(map(request_row, range(8)))
    assert give_all(ledger) == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (1, 5)]
    assert ledger.lose(1, PeerLostError("gone")) == 3 and ledger.lose(1, PeerLostError("gone")) is None
    for index in (0, 2, 4):
        assert ledger.start_writing(0, index, 1) is not None
    assert give_all(ledger) == [(0, 1), (0, 3), (0, 5)]
    for index in (1, 3, 5):
        assert ledger.start_writing(0, index, 1) is not None
    assert give_all(ledger) == [(0, 6), (0, 7)]


def test_a_row_that_cannot_run_is_always_for_replica_0():
    ledger = RowLedger(2, 1, 10**9)
    ledger.add([refused_row(0), request_row(1), request_row(2), refused_row(3), request_row(4)])
    assert give_all(ledger) == [(0, 0), (0, 1), (1, 2), (0, 3)]
    assert ledger.lose(0, PeerLostError("gone")) == 1
    assert [row.line - 1 for row in ledger.take(9)] == [0, 3], "without the requests"


def test_only_the_replica_that_holds_a_request_answers_it():
    ledger = RowLedger(2, MOST, 10**9)
    ledger.add(map(request_row, range(2)))
    assert give_all(ledger) == [(0, 0), (1, 1)]
    assert ledger.start_writing(0, 1, 1) is None and not ledger.may_be_late(0, 1)
    ledger.lose(1, PeerLostError("gone"))
    assert ledger.start_writing(1, 1, 1) is None and ledger.may_be_late(1, 1)
    ledger.abort()
    ledger.add([request_row(2)])
    assert give_all(ledger) == [(0, 2)]
    assert ledger.may_be_late(0, 0) and not ledger.may_be_late(0, 2)


def test_after_a_stop_nothing_more_is_given_and_what_a_lost_replica_held_is_dropped():
    ledger = RowLedger(2, MOST, 10**9)
    ledger.add(map(request_row, range(8)))
    assert len(give_all(ledger)) == 6
    ledger.stop()
    ledger.add([request_row(8)])
    assert ledger.lose(1, PeerLostError("gone")) == 3 and ledger.num_given == 3
    assert ledger.room == 0 and ledger.start_writing(0, 0, 1) is not None and ledger.room == 1
    assert give_all(ledger) == [] and not ledger.may_give


def test_the_run_fails_when_the_last_replica_is_lost_and_for_its_first_error():
    ledger, first, last = RowLedger(2, MOST, 10**9), PeerLostError("first"), PeerLostError("last")
    ledger.lose(1, first)
    assert ledger.failure is None and ledger.has_replicas
    ledger.lose(0, last)
    assert ledger.failure is last and not ledger.has_replicas
    ledger.abort()
    assert ledger.fail(OSError("full")) is last, "it stays lost"


class RowLedgerMachine(RuleBasedStateMachine):
    """The same events on lists, of row indices."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = RowLedger(3, MOST, MOST_TOKENS)
        self.rows: list[Row] = []
        self.waiting: list[int] = []
        self.queue: list[int] = []
        self.held: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.refused: list[int] = []  # taken by replica 0, cannot run
        self.writing: list[int] = []
        self.written: list[int] = []
        self.dropped: list[int] = []
        self.left: set[int] = set()
        self.stopped = False

    @property
    def present(self) -> list[int]:
        return [replica for replica in self.held if replica not in self.left]

    def tokens(self, replica: int) -> int:
        return sum(len(self.rows[index].request.prompt_token_ids) for index in self.held[replica])

    def has_room(self, replica: int) -> bool:
        return len(self.held[replica]) < MOST and self.tokens(replica) < MOST_TOKENS

    def answerable(self) -> list[tuple[int, int]]:
        held = [(replica, index) for replica, some in self.held.items() for index in some]
        return [(replica, index) for replica, index in held if index not in self.queue]

    @rule(sizes=st.lists(st.integers(1, 30) | st.none(), min_size=1, max_size=6))
    def add(self, sizes):
        first = len(self.rows)
        for index, size in enumerate(sizes, start=first):
            self.rows.append(refused_row(index) if size is None else request_row(index, size))
        self.ledger.add(self.rows[first:])
        (self.dropped if self.stopped else self.waiting).extend(range(first, len(self.rows)))

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 6))
    def give(self, count):
        for _ in range(count):
            self.give_one()

    def give_one(self) -> None:
        given = self.ledger.give()
        runs = bool(self.waiting) and self.rows[self.waiting[0]].request is not None
        if not self.waiting or (runs and not any(map(self.has_room, self.present))):
            assert given is None
            return
        replica, row = given
        assert row is self.rows[self.waiting[0]], "the rows keep their order"
        index = self.waiting.pop(0)
        if runs:
            assert replica in self.present and self.has_room(replica)
            self.held[replica].append(index)
        if replica == 0 or not runs:
            assert replica == 0
            self.queue.append(index)

    @precondition(lambda self: self.queue)
    @rule(limit=st.integers(0, 4))
    def take(self, limit):
        taken = [row.line - 1 for row in self.ledger.take(limit)]
        assert taken == self.queue[:limit]
        self.queue = self.queue[limit:]
        self.refused += [index for index in taken if self.rows[index].request is None]

    @precondition(lambda self: self.answerable())
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def end(self, data, tokens):
        self.end_one(*data.draw(st.sampled_from(self.answerable())), tokens)

    def end_one(self, replica: int, index: int, tokens: int) -> None:
        assert self.ledger.start_writing(replica, index, tokens) is self.rows[index]
        self.held[replica].remove(index)
        self.writing.append(index)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), replica=st.integers(0, 2))
    def answer_what_it_does_not_hold(self, data, replica):
        index = data.draw(st.integers(0, len(self.rows) - 1))
        if index not in self.held[replica]:
            assert self.ledger.start_writing(replica, index, 1) is None

    @precondition(lambda self: self.writing)
    @rule()
    def end_writing(self):
        self.ledger.end_writing()
        self.written.append(self.writing.pop())

    @precondition(lambda self: self.present and any(self.held.values()))
    @rule(data=st.data())
    def lose(self, data):
        replica, error = data.draw(st.sampled_from(self.present)), PeerLostError("gone")
        assert self.ledger.lose(replica, error) == len(self.held[replica])
        assert self.ledger.lost[replica] is error and self.ledger.lose(replica, PeerLostError("again")) is None
        self.remove(replica)
        assert (self.ledger.failure is error) == (not self.present)

    @precondition(lambda self: self.stopped and self.present)
    @rule(data=st.data())
    def leave(self, data):
        replica = data.draw(st.sampled_from(self.present))
        self.ledger.leave(replica)
        self.remove(replica)

    def remove(self, replica: int) -> None:
        self.left.add(replica)
        back, self.held[replica] = self.held[replica], []
        if replica == 0:
            self.queue = [index for index in self.queue if self.rows[index].request is None]
        if self.stopped:
            self.dropped += back
        else:
            self.waiting[:0] = back

    @precondition(lambda self: len(self.rows) > 9)
    @rule()
    def stop(self):
        self.ledger.stop()
        self.stopped = True
        self.dropped += self.waiting
        self.waiting = []

    @precondition(lambda self: self.stopped)
    @rule()
    def withdraw(self):
        self.ledger.withdraw()
        self.dropped += [index for index in self.queue if self.rows[index].request is None]
        self.queue = []

    @precondition(lambda self: len(self.rows) > 6 and any(self.held.values()))
    @rule()
    def abort(self):
        self.ledger.abort()
        held = [index for some in self.held.values() for index in some]
        self.dropped += {*self.waiting, *self.queue, *held}
        self.waiting, self.queue, self.held = [], [], {replica: [] for replica in self.held}

    @invariant()
    def each_is_in_one_place(self):
        held = [index for some in self.held.values() for index in some]
        queued = [index for index in self.queue if self.rows[index].request is None]
        ended = [*self.refused, *self.writing, *self.written, *self.dropped]
        assert sorted([*self.waiting, *held, *queued, *ended]) == list(range(len(self.rows)))
        assert [row.line - 1 for row in self.ledger._waiting] == self.waiting
        assert self.ledger.num_given == len(held) and self.ledger.num_queued == len(self.queue)
        assert self.ledger.num_writing == len(self.writing)
        assert [self.ledger.num_held(replica) for replica in self.held] == list(map(len, self.held.values()))

    @invariant()
    def it_says_what_is_left_to_do(self):
        assert self.ledger.has_replicas == bool(self.present)
        assert bool(self.ledger.room) == any(map(self.has_room, self.present))
        elsewhere = self.held[1] or self.held[2]
        assert self.ledger.needs_only_replica_0 == (not self.waiting and not elsewhere and not self.writing)
        held = any(self.held.values())
        assert self.ledger.may_give == (bool(self.waiting) or (held and not self.stopped))

    def teardown(self):
        """Check that no row is lost while a replica is left: in the end all rows that were not dropped are answered."""
        if not self.present:
            return
        for _ in self.rows:  # each round answers at least one
            for _ in range(len(self.waiting)):
                self.give_one()
            self.take(len(self.queue))
            for replica, index in self.answerable():
                self.end_one(replica, index, 1)
        while self.writing:
            self.end_writing()
        self.each_is_in_one_place()
        requests = {index for index, row in enumerate(self.rows) if row.request is not None}
        assert sorted(self.written) == sorted(requests - {*self.dropped})


TestRowLedger = RowLedgerMachine.TestCase
