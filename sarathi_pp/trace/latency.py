"""Latencies of finished requests, by the definitions of vLLM's benchmarks.

    ttft_s   arrival to first token
    e2el_s   arrival to last token
    tpot_s   (e2el - ttft) / (output tokens - 1), for outputs of at least two tokens
    itl_s    each gap between neighbouring tokens, of all requests together

Failed requests have no latencies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sarathi_pp.trace.events import RequestFinished


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a series, in its unit. All are None if the series is empty."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None)
        mean = sum(ordered) / len(ordered)
        return cls(mean, percentile(ordered, 50), percentile(ordered, 90), percentile(ordered, 99))

    @classmethod
    def of_counts(cls, counts: Mapping[int, int], unit: float) -> Spread:
        """Return the spread of a series of whole numbers. Use it for a long series with few different numbers.

        Args:
            counts: for each number, the times that it is in the series.
            unit: factor for the results, such as 1e-6 if the numbers are microseconds and the results seconds.
        """
        total = sum(counts.values())
        if not total:
            return cls(None, None, None, None)
        numbers = sorted(counts)
        last = list(
            accumulate(counts[number] for number in numbers)
        )  # for each number, the index after its last one in the sorted series

        def at(percent: float) -> float:
            place = (total - 1) * percent / 100
            below, above = (numbers[bisect_right(last, min(int(place) + step, total - 1))] for step in (0, 1))
            return unit * (below + (above - below) * (place - int(place)))

        mean = unit * sum(number * count for number, count in counts.items()) / total
        return cls(mean, at(50), at(90), at(99))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile (0 to 100) of a sorted, non-empty series, with linear interpolation as in numpy."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Latencies of one request in seconds, as the module's docstring defines them; None if there were too few tokens.

    Attributes:
        queue_s: from its arrival until its first chunk was issued; None if it never ran.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2el_s: float

    @classmethod
    def of(cls, request: RequestFinished) -> RequestLatency:
        e2el_s = request.finished_s - request.arrived_s
        queue_s = None if request.first_issue_s is None else request.first_issue_s - request.arrived_s
        if request.first_token_s is None:
            return cls(queue_s, None, None, e2el_s)
        ttft_s = request.first_token_s - request.arrived_s
        tpot_s = (e2el_s - ttft_s) / (request.output_tokens - 1) if request.output_tokens > 1 else None
        return cls(queue_s, ttft_s, tpot_s, e2el_s)


def latency_spreads(requests: Iterable[RequestFinished]) -> dict[str, Spread]:
    """Return the spreads of ttft_s, tpot_s, itl_s and e2el_s over the requests that did not fail."""
    succeeded = [request for request in requests if request.finish_reason != "error"]
    gaps_us: Counter[int] = Counter()
    for request in succeeded:
        gaps_us.update(request.gaps_us)
    series = _of_requests(succeeded)
    return {
        "ttft_s": Spread.of(series["ttft_s"]),
        "tpot_s": Spread.of(series["tpot_s"]),
        "itl_s": Spread.of_counts(gaps_us, 1e-6),
        "e2el_s": Spread.of(series["e2el_s"]),
    }


def latency_series(requests: Iterable[RequestFinished]) -> dict[str, list[float]]:
    """Return all values of each latency over the requests that did not fail, with the keys of `latency_spreads`."""
    succeeded = [request for request in requests if request.finish_reason != "error"]
    return {**_of_requests(succeeded), "itl_s": [gap_us * 1e-6 for one in succeeded for gap_us in one.gaps_us]}


def _of_requests(succeeded: Iterable[RequestFinished]) -> dict[str, list[float]]:
    latencies = [RequestLatency.of(request) for request in succeeded]
    return {
        "ttft_s": [x.ttft_s for x in latencies if x.ttft_s is not None],
        "tpot_s": [x.tpot_s for x in latencies if x.tpot_s is not None],
        "e2el_s": [x.e2el_s for x in latencies],
    }
