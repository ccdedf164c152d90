"""Several simulated pipelines on one virtual clock. They share requests like the replicas of a real run.

    requests --> LoadBalancer --+--> inbox of replica 0 --> its simulation
                                +--> inbox of replica 1 --> its simulation ...

The replica whose next step is due first makes the next step. A request goes to a replica as soon as it has arrived and
a replica has room: at its arrival, or when another request has ended. Messages between replicas take no time in the
simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.prefix_routes import PrefixRoutes
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
    routes: PrefixRoutes | None = None,
) -> None:
    """Simulate the replicas until all requests are answered.

    Args:
        make: makes the simulation of a replica. It takes the replica's index and the function that records its events.
        records: functions that record the events of a replica, one per replica.
        most: most requests that a replica may hold at once.
        most_tokens: number of prompt tokens at which a replica gets no further request.
        requests: in order of arrival.
        routes: see LoadBalancer.
    """
    balancer = LoadBalancer(len(records), most, most_tokens, routes)

    def ending(replica: int, record: Record) -> Record:
        def told(stage: int, event: Event) -> None:
            if isinstance(event, RequestFinished):
                balancer.end(replica, event.index, event.output_tokens)
            record(stage, event)

        return told

    replicas = [(make(index, ending(index, record)), Inbox()) for index, record in enumerate(records)]
    arrivals, now_s = InOrder(iter(requests)), 0.0
    while True:
        # If several are due at the same time, the first of them makes the step.
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
