"""Several pipelines on one virtual clock, which share requests out as rank 0 of a real run does.

    requests --> LoadBalancer --+--> inbox of replica 0 --> its simulation
                                +--> inbox of replica 1 --> its simulation ...

Of all replicas the one moves that is due first. A request is given to the one that has least to do as soon as it has
arrived and there is room, that is at 0, when it arrives, or when another one has ended; messages between replicas take
no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.request import Request
from sarathi_pp.sim.arrivals import Inbox, InOrder
from sarathi_pp.sim.simulation import Record, Simulation
from sarathi_pp.trace.events import Event, RequestFinished


def run_replicas(
    make: Callable[[int, Record], Simulation],
    records: Sequence[Record],
    most: int,
    most_tokens: int,
    requests: Iterable[Request],
) -> None:
    """Answer all requests, which come in order of arrival.

    make: a replica's simulation, by its index and whom it tells what happens. records: of each replica. most,
    most_tokens: see LoadBalancer.
    """
    balancer = LoadBalancer(len(records), most, most_tokens)

    def ending(replica: int, record: Record) -> Record:
        def told(stage: int, event: Event) -> None:
            if isinstance(event, RequestFinished):
                balancer.end(replica, event.index, event.output_tokens)
            record(stage, event)

        return told

    replicas = [(make(index, ending(index, record)), Inbox()) for index, record in enumerate(records)]
    arrivals, now_s = InOrder(iter(requests)), 0.0
    while True:
        # Among equals the first.
        due_s, index = min((one.due_s(inbox), index) for index, (one, inbox) in enumerate(replicas))
        given_s = max(now_s, arrivals.next_s) if balancer.room else inf
        if given_s <= due_s and (request := arrivals.take(given_s)) is not None:
            replicas[balancer.give(request)][1].put(given_s, request)
        elif due_s < inf:
            simulation, inbox = replicas[index]
            simulation.step(due_s, inbox)
            now_s = due_s
        else:
            return
