"""Steps that ranks take together: an error of one rank is an error of every rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sarathi_pp.distributed.agreement import Agreement
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import CapacityError, ConfigError, PeerLostError
from sarathi_pp.wire.mesh import Mesh

RANKS = 3
SOON_S = 10.0


class Plane:
    """A control plane of one rank in this process."""

    def __init__(self, rank: int, facts: list[str], barrier: threading.Barrier) -> None:
        self.env = RankEnvironment(rank, RANKS, rank, RANKS)
        self.mesh = Mesh(stages=RANKS)
        self.phases: list[str] = []
        self._facts = facts
        self._barrier = barrier

    @contextmanager
    def phase(self, name: str, detail: object = "") -> Iterator[None]:
        self.phases.append(name)
        yield

    def exchange(self, facts: dict[str, Any], *, with_timeout: bool = False) -> list[dict[str, Any]]:
        self._facts[self.env.rank] = json.dumps(facts)
        try:
            self._barrier.wait(0.5 if with_timeout else SOON_S)
        except threading.BrokenBarrierError:
            raise PeerLostError("another rank does not come") from None
        return [json.loads(each) for each in self._facts]


def take(*errors: Exception | None, answers: tuple[object, ...] = (0, 1, 2), must_match: bool = False) -> list[Future]:
    """Take one step on every rank; errors: the error that each raises inside, None for an answer."""
    facts, barrier = [""] * RANKS, threading.Barrier(RANKS)

    def work(rank: int) -> list[Any]:
        with Agreement(Plane(rank, facts, barrier)).step("loading", must_match=must_match) as step:  # type: ignore[arg-type]
            if (error := errors[rank]) is not None:
                raise error
            step.own = {"answer": answers[rank]}
        return [answer["answer"] for answer in step.answers]

    with ThreadPoolExecutor(RANKS) as pool:
        return [pool.submit(work, rank) for rank in range(RANKS)]


def test_every_rank_gets_every_answer():
    assert [taken.result() for taken in take(None, None, None)] == [[0, 1, 2]] * RANKS


def test_an_error_on_one_rank_is_raised_on_all_with_where_it_happened():
    for taken in take(None, CapacityError("no room"), None):
        error = taken.exception()
        assert (type(error), str(error)) == (CapacityError, "stage 1 (rank 1): no room")
        assert error.__context__ is None or error.__suppress_context__, "its own rank shows it twice"
        assert error.agreed


def test_of_several_errors_a_lost_peer_is_no_cause():
    for taken in take(PeerLostError("gone"), None, ConfigError("wrong")):
        assert str(taken.exception()) == "stage 2 (rank 2): wrong"


def test_a_bug_keeps_its_traceback_on_its_own_rank():
    first, second, third = take(None, ZeroDivisionError("division by zero"), None)
    assert isinstance(second.exception(), ZeroDivisionError)
    for taken in (first, third):
        assert isinstance(taken.exception(), PeerLostError)
        assert "ZeroDivisionError while it was loading: division by zero" in str(taken.exception())


def test_answers_that_must_match_and_do_not_are_refused():
    for taken in take(None, None, None, answers=(0, 0, 5), must_match=True):
        assert str(taken.exception()) == "answer differs: rank 0 has 0, rank 2 has 5"


def test_a_rank_with_an_error_does_not_wait_for_one_that_is_stuck():
    plane = Plane(0, [""] * RANKS, threading.Barrier(RANKS))
    with pytest.raises(CapacityError, match="no room"), Agreement(plane).step("loading"):  # type: ignore[arg-type]
        raise CapacityError("no room")
    assert plane.phases == ["loading"]


def test_what_all_ranks_do_alike_raises_an_error_that_rank_0_shows():
    agreement = Agreement(Plane(0, [""] * RANKS, threading.Barrier(RANKS)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused, agreement.alike():
        raise ConfigError("6 stages are more than the model's 5 layers")
    assert refused.value.agreed
