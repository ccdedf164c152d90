"""The requests per second that a pipeline serves within its latency bounds (Sarathi-Serve, arXiv 2403.02310, 5.1).

Requests arrive at random, as a Poisson process. The capacity is the highest rate that meets two conditions. The 99th
percentile of the time between tokens stays within the bound. The median request waits at most 2 s for its first chunk.
Bisection finds the rate: each step simulates the workload at another rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from sarathi_pp.sim.experiment import Experiment, simulate_replicas
from sarathi_pp.trace.latency import RequestLatency, Spread, latency_spreads

# Most seconds that the median request may wait for its first chunk.
_MOST_QUEUE_S = 2.0
# Relative error of the returned rate.
_GRANULARITY = 0.025
# If the whole workload arrives within this time, a higher rate changes nothing.
_AT_ONCE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Capacity:
    """A rate of arrivals, and the latencies that were simulated with it.

    Attributes:
        rate: requests per second. As a result: 0 if even the lowest rate exceeds the bounds. None if the workload stays
            within them although all its requests arrive at once.
        tbt_p99_s: 99th percentile of the time between tokens, in seconds; None without a second token.
        queue_p50_s: seconds that the median request waits for its first chunk.
    """

    rate: float | None
    tbt_p99_s: float | None
    queue_p50_s: float | None


def find_capacity(experiment: Experiment, tbt_slo_s: float) -> Capacity:
    """Return the highest rate of arrivals at which the simulated pipeline stays within the latency bounds.

    The requests are those of the experiment's workload. Times of arrival that the workload has are replaced.

    Args:
        tbt_slo_s: bound on the 99th percentile of the time between tokens, in seconds.
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
