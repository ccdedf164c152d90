"""The report of a run with several replicas, made from the reports of the replicas.

Its window is from the first issue of any replica to the last result. A replica may start after the window's start, or
end before its end, because the others had more to do. That time counts as the state `no_work` of the replica's stages,
and as the cause `ramp`. Latencies and request bubbles are those of all requests together. Steady figures, overlap,
variations and KV use are means over the replicas, each from its own steady window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean

from sarathi_pp.analysis.bubbles import Bubbles, busy_strip, measure_bubbles
from sarathi_pp.analysis.intervals import Interval
from sarathi_pp.analysis.summary import (
    STRIP_CELLS,
    CostFit,
    Report,
    percentiles,
    summarise_timeline,
    whole_run,
)
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.trace.latency import latency_spreads

# Keys of a report that are combined by sum, mean and maximum, and keys that are listed for each replica.
_COUNTS = ("microbatches", "requests", "completed", "failed", "prompt_tokens", "output_tokens", "preemptions")
_CACHE_COUNTS = ("prompt_tokens", "cached_tokens", "resumed_tokens", "computed_prompt_tokens", "evictions")
_MEANS = ("bubble_ratio_steady", "overlap", "cost_error", "microbatch_time_cv", "microbatch_tokens_cv")
_LARGEST = ("clock_uncertainty_s", "closing_error")
_OF_EACH = (
    *("microbatches", "requests", "completed", "failed", "wall_s", "total_tokens_per_s"),
    *("bubble_ratio", "bubble_ratio_steady"),
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a run, with its figures.

    Attributes:
        report: the report that `summarise_timeline` makes of this replica.
    """

    timeline: Timeline
    bubbles: Bubbles
    report: Report

    @classmethod
    def fold(cls, timeline: Timeline, fit: CostFit = None) -> Replica:
        """Return one replica with its bubbles and its report. Raise the errors of `summarise`."""
        bubbles = measure_bubbles(timeline)
        return cls(timeline, bubbles, summarise_timeline(timeline, bubbles, fit))

    @property
    def index(self) -> int:
        return self.timeline.stages[0].start.replica

    @property
    def offset_s(self) -> float:
        """Seconds that are added to the clock of the replica's leader to get the run's clock."""
        return self.timeline.stages[0].start.replica_offset_s

    @property
    def window(self) -> Interval:
        """The replica's window on the run's clock."""
        begin, end = self.timeline.window
        return begin + self.offset_s, end + self.offset_s


def summarise_replicas(replicas: Sequence[Replica]) -> Report:
    """Return one report of all replicas. A replica that was lost has no part in its figures.

    The report has the keys of one pipeline's report, and in addition `replicas`, `lost_replicas` and `per_replica`. For
    a run with a single replica, return the report of that replica.
    """
    num_replicas = replicas[0].timeline.stages[0].start.num_replicas
    if num_replicas == 1:
        return replicas[0].report
    lost = sorted(set(range(num_replicas)) - {replica.index for replica in replicas})
    ran = [replica.window for replica in replicas if replica.bubbles.wall_s > 0]
    window = (min(begin for begin, _ in ran), max(end for _, end in ran)) if ran else (0.0, 0.0)
    wall_s = window[1] - window[0]
    reports = [replica.report for replica in replicas]
    total = {name: sum(report[name] for report in reports) for name in _COUNTS}
    stages = [stage for replica in replicas for stage in _stages(replica, window)]
    return {
        **reports[0],
        **total,
        "replicas": num_replicas,
        "lost_replicas": lost,
        "wall_s": wall_s,
        "total_tokens_per_s": _rate(total["prompt_tokens"] + total["output_tokens"], wall_s),
        "output_tokens_per_s": _rate(total["output_tokens"], wall_s),
        "computed_tokens_per_s": _rate(_over_windows(reports, "computed_tokens_per_s"), wall_s),
        "chunk_throughput": _rate(_over_windows(reports, "chunk_throughput"), wall_s),
        "bubble_ratio": _mean(stage["bubble_ratio"] for stage in stages),
        **{name: _mean(report[name] for report in reports) for name in _MEANS},
        **{name: max(report[name] for report in reports) for name in _LARGEST},
        "per_stage": stages,
        "links": [link | {"replica": replica.index} for replica in replicas for link in replica.report["links"]],
        "causes": _causes(reports, wall_s),
        "request_bubble_s": percentiles(chain.from_iterable(r.bubbles.request_bubble_s.values() for r in replicas)),
        **_latencies(replicas),
        "kv": _kv([report["kv"] for report in reports]),
        "prefix_cache": _prefix_cache([report["prefix_cache"] for report in reports]),
        **whole_run([(replica.timeline, replica.offset_s) for replica in replicas]),
        "notes": [
            *(f"replica {one.index}: {note}" for one in replicas for note in one.report["notes"]),
            *(f"replica {one} has no part in these figures: it was lost, or its traces are elsewhere" for one in lost),
        ],
        "per_replica": [{"replica": one.index, **{name: one.report[name] for name in _OF_EACH}} for one in replicas],
    }


def _stages(replica: Replica, window: Interval) -> list[Report]:
    """Return the report of each stage of a replica, over the window of the whole run, on the run's clock."""
    wall_s, more_s = window[1] - window[0], window[1] - window[0] - replica.bubbles.wall_s
    own = window[0] - replica.offset_s, window[1] - replica.offset_s
    return [
        {
            **stage,
            "replica": replica.index,
            "wall_s": wall_s,
            "no_work_s": stage["no_work_s"] + more_s,
            "bubble_ratio": 1 - stage["compute_s"] / wall_s if wall_s > 0 else None,
            "busy_strip": busy_strip(timeline, own, STRIP_CELLS),
        }
        for stage, timeline in zip(replica.report["per_stage"], replica.timeline.stages, strict=True)
    ]


def _causes(reports: Sequence[Report], wall_s: float) -> Report | None:
    """Return the causes of all replicas; None if a replica ran too little to fit its costs."""
    if any(report["causes"] is None for report in reports):
        return None
    total = {name: sum(report["causes"][name] for report in reports) for name in reports[0]["causes"]}
    total["ramp_s"] += sum(len(report["per_stage"]) * (wall_s - report["wall_s"]) for report in reports)
    return total


def _latencies(replicas: Sequence[Replica]) -> Report:
    finished = list(chain.from_iterable(replica.timeline.finished for replica in replicas))
    return {name: asdict(spread) for name, spread in latency_spreads(finished).items()}


def _kv(kinds: Sequence[Report]) -> Report:
    return {
        **kinds[0],
        "peak_used": max(kv["peak_used"] for kv in kinds),
        **{name: _mean(kv[name] for kv in kinds) for name in ("mean_used", "fragmentation")},
    }


def _prefix_cache(of_each: Sequence[Report | None]) -> Report | None:
    """Return the figures of the prefix caches of all replicas. Each replica has its own, in the same mode."""
    caches = [one for one in of_each if one is not None]
    if not caches:
        return None
    total = {name: sum(one[name] for one in caches) for name in _CACHE_COUNTS}
    saved_s = [one["saved_compute_s"] for one in caches]
    return {
        **caches[0],
        **total,
        "hit_rate": total["cached_tokens"] / total["prompt_tokens"] if total["prompt_tokens"] else None,
        "idle_pages_most": max(one["idle_pages_most"] for one in caches),
        "saved_compute_s": None if None in saved_s else sum(saved_s),
    }


def _over_windows(reports: Iterable[Report], name: str) -> float:
    """Return a count over all replicas, from its rate in the window of each."""
    return float(sum((report[name] or 0.0) * report["wall_s"] for report in reports))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rate(count: float, wall_s: float) -> float | None:
    return count / wall_s if wall_s > 0 else None
