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
    """An offset in seconds between this rank's clock and a reference: reference = this clock + offset_s.

    The reference is the clock of the replica's leader. For a leader itself, it is the clock of rank 0. The true offset
    differs from offset_s by at most uncertainty_s.
    """

    offset_s: float = 0.0
    uncertainty_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClockSync:
    """The result of `sync_clocks` on one rank."""

    offset: ClockOffset
    lost: Mapping[int, PeerLostError] = field(default_factory=dict)  # errors of replicas that did not answer, by index


def sync_clocks(plane: ControlPlane, clock: Clock, replicas: Collection[int], *, may_lose: bool = False) -> ClockSync:
    """Measure this rank's clock offset. Every rank of the replicas, and rank 0, calls it at the same point.

    It takes a few milliseconds per rank.

    Args:
        replicas: indexes of the replicas whose ranks take part.
        may_lose: if a replica does not answer, rank 0 returns it in `lost` instead of raising.

    Raises:
        PeerLostError: a rank does not answer.
    """
    mesh, rank = plane.mesh, plane.env.rank
    coordinate = mesh.coordinate(rank)
    if not coordinate.leads:
        return ClockSync(_follow(plane, clock, mesh.leader(coordinate.replica)))
    offset = ClockOffset() if rank == 0 else _follow(plane, clock, 0)
    # The ranks of this leader's own replica come first. Otherwise they would wait while rank 0 waits for another leader
    # that does not answer.
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
    """Measure the offset of another rank's clock to this one, and send the result to that rank."""
    trials = (_ping(plane, clock, rank) for _ in range(_TRIALS))
    best = min(trials, key=lambda trial: trial.uncertainty_s)
    plane.send_numbers([best.offset_s, best.uncertainty_s], rank)


def _follow(plane: ControlPlane, clock: Clock, leader: int) -> ClockOffset:
    """Answer the leader's pings with this clock's time, and return the offset that the leader has measured."""
    for _ in range(_TRIALS):
        plane.receive_numbers(1, leader)
        plane.send_numbers([clock.now()], leader)
    return ClockOffset(*plane.receive_numbers(2, leader))


def _ping(plane: ControlPlane, clock: Clock, rank: int) -> ClockOffset:
    """Send one ping to a rank, and return the offset of its clock to this one."""
    sent_s = clock.now()
    plane.send_numbers([0.0], rank)
    (there_s,) = plane.receive_numbers(1, rank)
    back_s = clock.now()
    return ClockOffset((sent_s + back_s) / 2 - there_s, (back_s - sent_s) / 2)
