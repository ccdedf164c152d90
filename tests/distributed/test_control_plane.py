"""Who is named when ranks wait for one that does not come."""

from __future__ import annotations

import threading
import time

import pytest

from sarathi_pp.distributed import control_plane
from sarathi_pp.distributed.control_plane import Topology
from sarathi_pp.distributed.environment import Place
from sarathi_pp.errors import PeerLostError

TIMED_OUT = RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete")


class Store:
    """Knows of rank 2 that it came; of nothing, ever, where its holder is stopped."""

    def __init__(self, stopped: bool) -> None:
        self._stopped = stopped

    def check(self, keys: list[str]) -> bool:
        if self._stopped:
            threading.Event().wait()
        return keys == ["came/4/2"]


def waiting(rank: int, *, stopped: bool = False) -> Topology:
    made = Topology(Place(), 5.0, 3.0)
    made.place = Place(rank, 4, rank, 4)
    made._names = [f"stage {number}" for number in range(4)]
    made._exchanges, made._store = 4, Store(stopped)
    return made


def said(made: Topology, error: RuntimeError, other: int | None = None) -> str:
    with pytest.raises(PeerLostError) as lost, made._others_may_leave(other):
        raise error
    return str(lost.value)


def test_those_that_have_not_come_are_named():
    assert said(waiting(1), TIMED_OUT).startswith("no word from stage 0 and stage 3 within 5 s")


def test_a_store_whose_holder_is_stopped_is_not_waited_for(monkeypatch):
    """Its `check` would never return, and the rank would never end."""
    monkeypatch.setattr(control_plane, "_TOLD_S", 0.1)
    began_s = time.monotonic()
    assert said(waiting(1, stopped=True), TIMED_OUT).startswith("no word from another rank within 5 s")
    assert time.monotonic() - began_s < 10.0


def test_of_two_ends_the_other_one_is_named():
    assert said(waiting(0), TIMED_OUT, 2).startswith("no word from stage 2 within")
    assert said(waiting(1), TIMED_OUT, 0).startswith("no word from stage 0 or a rank that it waits for within")


def test_a_closed_connection_is_no_silence():
    assert "another rank left" in said(waiting(1), RuntimeError("Connection closed by peer"))
