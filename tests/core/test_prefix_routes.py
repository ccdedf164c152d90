"""Requests that go to the replica that knows the beginning of their prompt, unless it has too much to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core import prefix_routes
from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_cache import prompt_digests
from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.core.request import Request
from sarathi_pp.engine.row_ledger import RowLedger
from sarathi_pp.errors import PeerLostError
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams

CHUNK = 6
LIMITS = Limits(1, CHUNK, 4, 64, 1, 64, 1, prefix_cache="all")


def request(index: int, prompt: str) -> Request:
    return Request(index, tuple(map(ord, prompt)), SamplingParams(seed=0))


def balancer(num_replicas: int, most: int = 100, chunk_size: int = CHUNK) -> LoadBalancer:
    routes = PrefixRoutes(Limits(1, chunk_size, 4, 64, 1, 64, 1, prefix_cache="all"))
    return LoadBalancer(num_replicas, most, 10**9, routes)


def give_all(to: LoadBalancer, *prompts: str) -> list[int]:
    return [to.give(request(index, prompt)) for index, prompt in enumerate(prompts)]


def test_a_prompt_goes_to_the_replica_that_knows_its_beginning() -> None:
    # Without a record, each would go to the replica with the least work: 0, 1, 2, 0, 1, 2.
    assert give_all(balancer(3, chunk_size=99), "aaa", "bbb", "ccc", "bbx", "bbb", "ayy") == [0, 1, 2, 1, 1, 0]


def test_the_deepest_known_beginning_decides() -> None:
    to = balancer(2)
    assert give_all(to, "abcdefgh", "xbcdefgh") == [0, 1]
    assert to.give(request(2, "x")) == 1  # 8 + 6 tokens are allowed, and replica 0 has less
    to.end(1, 1, 0)
    to.end(1, 2, 0)
    assert to.give(request(3, "abzzzzzz")) == 1, "replica 0 knows 2 tokens of it, and has too much to do: 8 to 0"
    # Now replica 1 was the last to get ab, and replica 0 the last to get abcd.
    assert to.give(request(4, "abcd")) == 0


def test_the_most_work_of_a_replica_that_knows_the_prompt() -> None:
    """It is 1.25 times the least, and one chunk of 6 tokens: 16 tokens against 8, and not 17."""
    for load, chosen in ((16, 0), (17, 1)):
        to = balancer(2)
        assert give_all(to, "a" * load, "b" * 8) == [0, 1]
        assert to.give(request(2, "a")) == chosen


def test_a_replica_that_knows_the_prompt_may_hold_a_quarter_more() -> None:
    to = balancer(2, most=4, chunk_size=99)
    assert give_all(to, *"aaaab") == [0, 0, 0, 0, 1] and to.room == 3
    assert to.give(request(5, "a")) == 0 and to.room == 3
    assert [to.give(request(index, "a")) for index in (6, 7, 8)] == [1, 1, 1] and to.room == 0


def test_a_replica_that_holds_its_tokens_gets_nothing() -> None:
    to = LoadBalancer(2, 100, 10, PrefixRoutes(LIMITS))
    assert give_all(to, "a" * 10, "b" * 9, "a") == [0, 1, 1]


def test_a_lost_replica_knows_nothing_anymore() -> None:
    to = balancer(3)
    assert give_all(to, "aaaa", "bbbb", "cccc") == [0, 1, 2]
    to.lose(1)
    assert to.give(request(3, "bbbb")) == 0, "of two with equally little work, the first"
    assert to.give(request(4, "bbbb")) == 0, "4 + 4 tokens, of 4 * 1.25 + 6"


def test_a_replica_that_was_emptied_knows_nothing_anymore() -> None:
    to = balancer(2)
    assert give_all(to, "aaaa", "bbbb") == [0, 1]
    to.clear()
    assert to.give(request(2, "bbbb")) == 0


def test_prompts_are_known_by_few_digests_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_routes, "MOST_DIGESTS", 8)
    routes = PrefixRoutes(LIMITS)
    marks = {prompt: routes.marks(request(0, prompt)) for prompt in ("a" * 9, "b" * 8, "ccc", "d", "")}
    assert [len(found) for found in marks.values()] == [4, 4, 2, 1, 0]
    digests = prompt_digests(request(0, "a" * 9), LIMITS)
    assert marks["a" * 9] == [digests[depth - 1] for depth in (8, 4, 2, 1)]
    routes.add(marks["a" * 9], 0)
    routes.add(marks["b" * 8], 1)
    routes.add(marks["a" * 9], 2)
    assert [*routes.known(marks["a" * 9])] == [2] * 4 and [*routes.known(marks["b" * 8])] == [1] * 4
    routes.add(marks["ccc"], 0)
    assert len(routes._replicas) == 8
    # Those of bbbbbbbb had not been used for longest, the deepest for longest of them.
    assert [*routes.known(marks["b" * 8])] == [1] * 2 and [*routes.known(marks["a" * 9])] == [2] * 4


def test_without_the_prefix_cache_there_is_no_record() -> None:
    assert PrefixRoutes.of(Limits(1, CHUNK, 4, 64, 1, 64, 1)) is None
    assert PrefixRoutes.of(LIMITS) is not None


STEPS = st.lists(
    st.tuples(st.sampled_from(["give", "give", "give", "end", "lose"]), st.text("ab", max_size=12), st.integers(0, 99)),
    max_size=60,
)


@given(STEPS)
def test_no_replica_gets_more_than_the_bound_and_none_is_lost(steps: list[tuple[str, str, int]]) -> None:
    to, held = balancer(3, most=8), [dict[int, int](), {}, {}]
    outputs, known = [], [set[str](), set(), set()]
    for index, (kind, prompt, number) in enumerate(steps):
        everywhere = [(replica, each) for replica in to.present for each in held[replica]]
        if kind == "give" and to.room:
            mean = sum(outputs) / len(outputs) if outputs else 0
            works = {replica: sum(held[replica].values()) + mean * len(held[replica]) for replica in to.present}
            room = [replica for replica in works if len(held[replica]) < 8]
            replica = to.give(request(index, "c" + prompt))
            assert works[replica] <= 1.25 * min(works[each] for each in room) + CHUNK
            assert len(held[replica]) < 10 and (replica in room or prompt in known[replica])
            known[replica].update(prompt[:end] for end in range(len(prompt) + 1))
            held[replica][index] = 1 + len(prompt)
        elif kind == "end" and everywhere:
            replica, ended = everywhere[number % len(everywhere)]
            to.end(replica, ended, number % 9)
            outputs.append(number % 9)
            del held[replica][ended]
        elif kind == "lose" and len(to.present) > 1:
            replica = to.present[number % len(to.present)]
            assert [each.index for each in to.lose(replica)] == [*held[replica]]
            held[replica] = {}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=40))
def test_prompts_that_share_nothing_go_as_without_the_prefix_cache(drawn: list[tuple[int, int]]) -> None:
    plain, routed = LoadBalancer(3, 100, 10**9), balancer(3)
    for index, (_, size) in enumerate(drawn):
        one = Request(index, (index,) * size, SamplingParams(seed=0))
        assert plain.give(one) == routed.give(one)


def test_the_ledger_shares_rows_by_their_prompts() -> None:
    ledger = RowLedger(2, 100, 10**9, PrefixRoutes(LIMITS))
    rows = [Row(index + 1, index, "own", request(index, prompt)) for index, prompt in enumerate(("aa", "bb", "bc"))]
    ledger.add(rows)
    given = [ledger.give() for _ in rows]
    assert [each[0] for each in given if each is not None] == [0, 1, 1]
    assert ledger.lose(1, PeerLostError("gone")) == 2
    again = [ledger.give() for _ in range(3)]
    assert [each[:1] for each in again if each is not None] == [(0,), (0,)]
