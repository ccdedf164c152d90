"""The requests per second that a pipeline serves within its latency bounds (Sarathi-Serve, arXiv 2403.02310, 5.1).

This is the highest Poisson rate that meets two conditions. The 99th percentile of the time between tokens stays within
the bound. The median request waits at most 2 s for its first chunk. Bisection finds the rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from sarathi_pp.sim.experiment import Experiment, simulate_replicas
from sarathi_pp.trace.latency import RequestLatency, Spread, latency_spreads

_MOST_QUEUE_S = 2.0
# Relative error of the rate.
_GRANULARITY = 0.025
# Requests that all arrive within this time are there at once, and a higher rate changes nothing.
_AT_ONCE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate within the bounds, and what was measured at that rate.

    Attributes:
        rate: requests per second. 0 if even the lowest rate misses the bounds. None if the requests are too few to miss
            them, even all at once.
    """

    rate: float | None
    tbt_p99_s: float | None
    queue_p50_s: float | None


def find_capacity(experiment: Experiment, tbt_slo_s: float) -> Capacity:
    """Return the capacity of the experiment's policy on its workload, whose own arrivals are not used.

    Args:
        tbt_slo_s: bound on the time between tokens, in seconds.
    """
    best = Capacity(0.0, None, None)
    low, rate = 0.0, 1.0
    high: float | None = None
    while high is None or high - low > _GRANULARITY * high:
        seen = _serve(experiment, rate)
        if _within(seen, tbt_slo_s):
            best, low = seen, rate
        else:
            high = rate
        if high is not None and high < 1e-3:
            break
        if high is None and rate * _AT_ONCE_S > experiment.workload.num_requests:
            return replace(best, rate=None)
        rate = 2 * rate if high is None else (low + high) / 2
    return best


def _within(seen: Capacity, tbt_slo_s: float) -> bool:
    tbt_s, queue_s = seen.tbt_p99_s or 0.0, seen.queue_p50_s or 0.0
    return tbt_s <= tbt_slo_s and queue_s <= _MOST_QUEUE_S


def _serve(experiment: Experiment, rate: float) -> Capacity:
    workload = experiment.workload.at_rate(rate)
    replicas = simulate_replicas(replace(experiment, workload=workload))
    finished = list(chain.from_iterable(timeline.finished for timeline in replicas))
    queued = Spread.of(latency.queue_s for latency in map(RequestLatency.of, finished) if latency.queue_s is not None)
    return Capacity(rate, latency_spreads(finished)["itl_s"].p99, queued.p50)
