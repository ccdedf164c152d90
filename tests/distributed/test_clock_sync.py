"""Offsets that two ranks compute from clocks that are seconds apart and messages with delays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from sarathi_pp.distributed.clock_sync import ClockOffset, ClockSync, sync_clocks
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.mesh import Mesh
from tests.machine import patient

TRIALS = 20


class World:
    """One time for both ranks, which passes only while a message is in transit."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.lock = threading.Lock()

    def pass_time(self, seconds: float) -> None:
        with self.lock:
            self.now_s += seconds


@dataclass
class WorldClock:
    world: World
    behind_s: float = 0.0

    def now(self) -> float:
        return self.world.now_s - self.behind_s


@dataclass
class FakePlane:
    """A rank's control channel in which each message takes the next time of `delays`."""

    env: RankEnvironment
    mesh: Mesh
    world: World
    outbox: queue.SimpleQueue[list[float]]
    inbox: queue.SimpleQueue[list[float]]
    delays: Iterator[float] = field(default_factory=lambda: iter(()))

    def send_numbers(self, numbers: list[float], rank: int) -> None:
        self.world.pass_time(next(self.delays, 0.0))
        self.outbox.put(numbers)

    def receive_numbers(self, count: int, rank: int) -> list[float]:
        numbers = self.inbox.get(timeout=patient(10))
        assert len(numbers) == count
        return numbers


def aligned(skew_s: float, there: list[float], back: list[float]) -> ClockOffset:
    """Return the offset that rank 1 computes, with a clock skew_s behind rank 0's."""
    world = World()
    one, other = queue.SimpleQueue[list[float]](), queue.SimpleQueue[list[float]]()
    first = FakePlane(RankEnvironment(0, 2, 0, 2), Mesh(stages=2), world, one, other, iter(there))
    second = FakePlane(RankEnvironment(1, 2, 1, 2), Mesh(stages=2), world, other, one, iter(back))
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(sync_clocks, first, WorldClock(world), [0])
        theirs = pool.submit(sync_clocks, second, WorldClock(world, skew_s), [0])
        assert mine.result(patient(20)) == ClockSync(ClockOffset())
        return theirs.result(patient(20)).offset


@pytest.mark.parametrize("skew_s", [5.0, -3600.0, 0.0])
def test_added_to_the_local_time_the_offset_gives_rank_0_s(skew_s: float) -> None:
    found = aligned(skew_s, [1e-3] * TRIALS, [1e-3] * TRIALS)
    assert found.offset_s == pytest.approx(skew_s, abs=1e-9)
    assert found.uncertainty_s == pytest.approx(1e-3)


def test_the_uncertainty_holds_where_one_way_takes_all_the_time() -> None:
    for there_s, back_s in ((4e-3, 0.0), (0.0, 4e-3)):
        found = aligned(5.0, [there_s] * TRIALS, [back_s] * TRIALS)
        assert found.uncertainty_s == pytest.approx(2e-3)
        assert abs(found.offset_s - 5.0) == pytest.approx(2e-3)


def test_of_slow_and_lopsided_trials_and_one_quick_one_the_quick_one_counts() -> None:
    there, back = [50e-3] * TRIALS, [1e-3] * TRIALS
    there[7] = back[7] = 0.1e-3
    found = aligned(5.0, there, back)
    assert found.offset_s == pytest.approx(5.0, abs=1e-9)
    assert found.uncertainty_s == pytest.approx(0.1e-3)


@dataclass
class LostLeaders:
    """The control channel of rank 0 in a run of replicas of one rank each, some of which are lost."""

    gone: set[int]
    env: RankEnvironment = field(default_factory=RankEnvironment)
    mesh: Mesh = field(default_factory=lambda: Mesh(replicas=4))

    def send_numbers(self, numbers: list[float], rank: int) -> None:
        if rank in self.gone:
            raise PeerLostError(f"rank {rank} is gone")

    def receive_numbers(self, count: int, rank: int) -> list[float]:
        return [0.0] * count


def test_replicas_that_do_not_answer_are_returned_if_the_run_may_lose_them() -> None:
    sync = sync_clocks(LostLeaders({1, 3}), ManualClock(), [0, 1, 2, 3], may_lose=True)
    assert {replica: str(error) for replica, error in sync.lost.items()} == {1: "rank 1 is gone", 3: "rank 3 is gone"}
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        sync_clocks(LostLeaders({1, 3}), ManualClock(), [0, 1, 2, 3])
