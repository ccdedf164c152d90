"""How far each rank's clock is from that of its replica's leader, and a leader's from rank 0's, by ping-pong.

    leader:  sent_s ----.                .---> back_s        offset = (sent_s + back_s) / 2 - there_s
    rank r:              `---> there_s --'                   uncertainty = (back_s - sent_s) / 2

The fastest of several trials counts: the less time it took, the less of it can have been one-sided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sarathi_pp.distributed.control_plane import Topology
from sarathi_pp.errors import PeerLostError

_TRIALS = 20


@dataclass(frozen=True, slots=True)
class Offset:
    """The other clock's time = local time + offset_s, give or take uncertainty_s."""

    offset_s: float = 0.0
    uncertainty_s: float = 0.0


def align(
    topology: Topology,
    now: Callable[[], float],
    replicas: Collection[int],
    give_up: Callable[[int, PeerLostError], None] | None = None,
) -> Offset:
    """This rank's offset to its leader, a leader's to rank 0. Takes a few milliseconds a rank.

    Every rank of these replicas, and rank 0, calls it at the same point. give_up: told on rank 0 of a replica that does
    not answer; PeerLostError without.
    """
    mesh, rank = topology.mesh, topology.place.rank
    seat = mesh.seat(rank)
    if not seat.leads:
        return _follow(topology, now, mesh.leader(seat.replica))
    offset = Offset() if rank == 0 else _follow(topology, now, 0)
    # Its own members first: they wait no longer than this rank does for a leader that does not answer.
    others = {replica: [mesh.leader(replica)] for replica in replicas if rank == 0 and replica != 0}
    mine = {seat.replica: mesh.members(seat.replica)[1:]} if seat.replica in replicas else {}
    for replica, ranks in (*mine.items(), *others.items()):
        try:
            for one in ranks:
                _lead(topology, now, one)
        except PeerLostError as error:
            if give_up is None or rank != 0:
                raise
            give_up(replica, error)
    return offset


def _lead(topology: Topology, now: Callable[[], float], rank: int) -> None:
    best = min((_ping(topology, rank, now) for _ in range(_TRIALS)), key=lambda trial: trial.uncertainty_s)
    topology.send_numbers([best.offset_s, best.uncertainty_s], rank)


def _follow(topology: Topology, now: Callable[[], float], leader: int) -> Offset:
    for _ in range(_TRIALS):
        topology.receive_numbers(1, leader)
        topology.send_numbers([now()], leader)
    return Offset(*topology.receive_numbers(2, leader))


def _ping(topology: Topology, rank: int, now: Callable[[], float]) -> Offset:
    sent_s = now()
    topology.send_numbers([0.0], rank)
    (there_s,) = topology.receive_numbers(1, rank)
    back_s = now()
    return Offset((sent_s + back_s) / 2 - there_s, (back_s - sent_s) / 2)
