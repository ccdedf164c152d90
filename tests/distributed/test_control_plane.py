"""Ranks wait for one that does not come: the error names it."""

from __future__ import annotations

import threading
import time

import pytest

from sarathi_pp.distributed import control_plane
from sarathi_pp.distributed.control_plane import Connection, ControlPlane
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.network_interface import Interface
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.mesh import Mesh
from tests.machine import patient

TIMED_OUT = RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete")


class Store:
    """A store that knows that rank 2 came; with a stopped holder it never answers."""

    def __init__(self, stopped: bool) -> None:
        self._stopped = stopped

    def check(self, keys: list[str]) -> bool:
        if self._stopped:
            threading.Event().wait()
        return keys == ["came/4/2"]


class Closed:
    """A group that nothing passes through."""

    def close(self) -> None: ...


def waiting(rank: int, *, stopped: bool = False) -> ControlPlane:
    connection = Connection(Store(stopped), Interface("lo", "127.0.0.1"), Closed(), None)  # type: ignore[arg-type]
    plane = ControlPlane(RankEnvironment(rank, 4, rank, 4), Mesh(stages=4), 5.0, SystemClock(), connection)
    plane._num_exchanges = 4
    return plane


def said(plane: ControlPlane, error: RuntimeError, other: int | None = None) -> str:
    with pytest.raises(PeerLostError) as lost, plane.others_may_leave(other):
        raise error
    return str(lost.value)


def test_those_that_have_not_come_are_named():
    assert said(waiting(1), TIMED_OUT).startswith(
        "received nothing from stage 0 (rank 0) and stage 3 (rank 3) within 5 s"
    )


def test_a_store_whose_holder_is_stopped_is_not_waited_for(monkeypatch):
    """Its `check` would never return, and the rank would never end."""
    monkeypatch.setattr(control_plane, "_STORE_ANSWER_S", 0.1)
    began_s = time.monotonic()
    assert said(waiting(1, stopped=True), TIMED_OUT).startswith("received nothing from another rank within 5 s")
    assert time.monotonic() - began_s < patient(10.0)


def test_of_two_ends_the_other_one_is_named():
    assert said(waiting(0), TIMED_OUT, 2).startswith("received nothing from stage 2 (rank 2) within")
    assert said(waiting(1), TIMED_OUT, 0).startswith(
        "received nothing from stage 0 (rank 0) or a rank that it waits for within"
    )


def test_a_closed_connection_is_no_silence():
    assert "another rank left" in said(waiting(1), RuntimeError("Connection closed by peer"))
