"""Measure each rank's clock against that of its replica's leader, and each leader's clock against rank 0's.

Events of all ranks share one time line. The measurement is a ping-pong over the control plane:

    leader:  sent_s ----.                .---> back_s        offset = (sent_s + back_s) / 2 - there_s
    rank r:              `---> there_s --'                   uncertainty = (back_s - sent_s) / 2

The fastest of several trials counts. The error is largest if one way took the whole trip, so a short trip bounds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import Clock

_TRIALS = 20


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A clock offset: the leader's time is local time + offset_s, plus or minus uncertainty_s."""

    offset_s: float = 0.0
    uncertainty_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClockSync:
    """The result of a sync on one rank."""

    offset: ClockOffset
    lost: Mapping[int, PeerLostError] = field(default_factory=dict)  # by replica; those that did not answer


def sync_clocks(plane: ControlPlane, clock: Clock, replicas: Collection[int], *, may_lose: bool = False) -> ClockSync:
    """Measure this rank's clock offset. Every rank of the replicas, and rank 0, calls it at the same point.

    It takes a few milliseconds per rank.

    Args:
        may_lose: on rank 0, return replicas that do not answer as lost instead of raising.

    Raises:
        PeerLostError: a rank does not answer.
    """
    mesh, rank = plane.mesh, plane.env.rank
    coordinate = mesh.coordinate(rank)
    if not coordinate.leads:
        return ClockSync(_follow(plane, clock, mesh.leader(coordinate.replica)))
    offset = ClockOffset() if rank == 0 else _follow(plane, clock, 0)
    # Own members first. Otherwise they would wait while this rank waits for a leader that does not answer.
    followers = {coordinate.replica: mesh.members(coordinate.replica)[1:]} if coordinate.replica in replicas else {}
    if rank == 0:
        followers |= {replica: (mesh.leader(replica),) for replica in replicas if replica != 0}
    lost: dict[int, PeerLostError] = {}
    for replica, ranks in followers.items():
        try:
            for follower in ranks:
                _lead(plane, clock, follower)
        except PeerLostError as error:
            if not may_lose or rank != 0:
                raise
            lost[replica] = error
    return ClockSync(offset, lost)


def _lead(plane: ControlPlane, clock: Clock, rank: int) -> None:
    trials = (_ping(plane, clock, rank) for _ in range(_TRIALS))
    best = min(trials, key=lambda trial: trial.uncertainty_s)
    plane.send_numbers([best.offset_s, best.uncertainty_s], rank)


def _follow(plane: ControlPlane, clock: Clock, leader: int) -> ClockOffset:
    for _ in range(_TRIALS):
        plane.receive_numbers(1, leader)
        plane.send_numbers([clock.now()], leader)
    return ClockOffset(*plane.receive_numbers(2, leader))


def _ping(plane: ControlPlane, clock: Clock, rank: int) -> ClockOffset:
    sent_s = clock.now()
    plane.send_numbers([0.0], rank)
    (there_s,) = plane.receive_numbers(1, rank)
    back_s = clock.now()
    return ClockOffset((sent_s + back_s) / 2 - there_s, (back_s - sent_s) / 2)
