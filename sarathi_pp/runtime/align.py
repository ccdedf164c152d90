"""How far each rank's clock is from rank 0's, by ping-pong over the control group.

    rank 0:  sent_s ----.                .---> back_s        offset = (sent_s + back_s) / 2 - there_s
    rank r:              `---> there_s --'                   uncertainty = (back_s - sent_s) / 2

The fastest of several trials counts: the less time it took, the less of it can have been one-sided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sarathi_pp.runtime.topology import Topology

_TRIALS = 20


@dataclass(frozen=True, slots=True)
class Offset:
    """rank 0's time = local time + offset_s, give or take uncertainty_s."""

    offset_s: float = 0.0
    uncertainty_s: float = 0.0


def align(topology: Topology, now: Callable[[], float]) -> Offset:
    """This rank's offset; every rank calls it at the same point. Takes a few milliseconds a rank."""
    place = topology.place
    if place.rank == 0:
        for rank in range(1, place.world_size):
            best = min((_ping(topology, rank, now) for _ in range(_TRIALS)), key=lambda trial: trial.uncertainty_s)
            topology.send_numbers([best.offset_s, best.uncertainty_s], rank)
        return Offset()
    for _ in range(_TRIALS):
        topology.receive_numbers(1, 0)
        topology.send_numbers([now()], 0)
    return Offset(*topology.receive_numbers(2, 0))


def _ping(topology: Topology, rank: int, now: Callable[[], float]) -> Offset:
    sent_s = now()
    topology.send_numbers([0.0], rank)
    (there_s,) = topology.receive_numbers(1, rank)
    back_s = now()
    return Offset((sent_s + back_s) / 2 - there_s, (back_s - sent_s) / 2)
