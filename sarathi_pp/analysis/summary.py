"""The report of one run as a JSON document, report.json. It is computed from the traces alone.

Figures that do not exist (no result, no steady window, no second token) are null. Throughput counts the tokens of
completed requests over the run window. Loading and reporting are outside it. Prompt tokens count whether they were
computed or found in the prefix cache. `computed_tokens_per_s` counts the tokens of microbatches instead.

Traces have a largest size. If one was cut there, every figure is about the first part of the run, up to the cut.
`whole_run` then holds the counts and rates of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, Protocol

from sarathi_pp.analysis.bubbles import Bubbles, StageBubbles, busy_strip, measure_bubbles
from sarathi_pp.analysis.causes import explain
from sarathi_pp.analysis.links import links_of
from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.errors import InputError
from sarathi_pp.trace.events import Event, RequestFinished
from sarathi_pp.trace.latency import Spread, latency_spreads
from sarathi_pp.trace.recorder import read_trace

SCHEMA = "sarathi-pp/report/1"
# The schema of a document that holds several reports.
RUNS_SCHEMA = "sarathi-pp/runs/1"

_CLOSING_TOLERANCE = 0.01
# Fields of Totals that are summed over replicas.
_SUMS = ("microbatches", "requests", "completed", "failed", "prompt_tokens", "output_tokens")
# Number of cells of `busy_strip`, a stage's load over time.
STRIP_CELLS = 64
_UNFITTED = (
    "the run has too few microbatches to fit a cost model: no causes and no advice about time; run more requests",
)

Report = dict[str, Any]


class FittedCost(Protocol):
    """A cost model and its error: the mean of |modelled - measured| / measured over compute spans."""

    @property
    def model(self) -> CostModel: ...
    @property
    def error(self) -> float: ...


# None: there was no attempt to fit a cost model. "too short": the run has too few microbatches for it.
CostFit = FittedCost | Literal["too short"] | None


def summarise(
    traces: Sequence[Path | Iterable[Event]], facts: Mapping[str, object] | None = None, fit: CostFit = None
) -> Report:
    """Return the report of one run from its traces, one per stage, as files or as events.

    Args:
        facts: further keys of the report that no trace holds (model, versions, input lines that an earlier attempt has
            answered). They replace computed keys of the same name.
        fit: cost model from which the causes of the bubble are computed. Without it, the causes are null.

    Raises:
        InputError, MissingError: the traces cannot be used.
    """
    timeline = read_timeline(traces)
    return summarise_timeline(timeline, measure_bubbles(timeline), fit) | dict(facts or {})


def read_timeline(traces: Sequence[Path | Iterable[Event]]) -> Timeline:
    """Return the timeline of one run from its traces. Raises InputError or MissingError if they cannot be used."""
    if not traces:
        raise InputError("there are no traces; a report needs one per stage")
    timeline = Timeline.read(read_trace(trace) if isinstance(trace, Path) else trace for trace in traces)
    timeline.check_order()
    return timeline


def summarise_timeline(timeline: Timeline, bubbles: Bubbles, fit: CostFit = None) -> Report:
    """Return the report of a run from its timeline and its bubbles. See `summarise` for `fit`."""
    settings = timeline.stages[0].start
    fitted = fit if fit != "too short" else None
    return {
        "schema": SCHEMA,
        "policy": settings.policy,
        "stages": settings.num_stages,
        "chunk_size": settings.chunk_size,
        "layer_split": [stage.start.layers[1] - stage.start.layers[0] for stage in timeline.stages],
        "inflight": settings.most_inflight,
        "device": settings.device,
        "started_unix_s": settings.unix_s or None,  # a simulated run has no date
        "microbatches": timeline.num_returned,
        "wall_s": bubbles.wall_s,
        **_throughput(timeline, bubbles.wall_s),
        "bubble_ratio": bubbles.bubble_ratio,
        "bubble_ratio_steady": bubbles.bubble_ratio_steady,
        "overlap": bubbles.overlap,
        "per_stage": [
            _stage_report(stage, measured) | {"busy_strip": busy_strip(stage, timeline.window, STRIP_CELLS)}
            for stage, measured in zip(timeline.stages, bubbles.stages, strict=True)
        ],
        "links": links_of(timeline),
        "causes": asdict(explain(timeline, fitted.model)) if fitted is not None else None,
        "cost_error": fitted.error if fitted is not None else None,
        "request_bubble_s": percentiles(bubbles.request_bubble_s.values()),
        **{name: asdict(spread) for name, spread in latency_spreads(timeline.finished).items()},
        **_variation(timeline, bubbles),
        "kv": _kv(timeline),
        "prefix_cache": _prefix_cache(timeline, fitted.model if fitted is not None else None),
        "preemptions": sum(request.preemptions for request in timeline.finished),
        "clock_uncertainty_s": max(_clock_uncertainty(stage) for stage in timeline.stages),
        "closing_error": max(stage.closing_error for stage in bubbles.stages),
        **whole_run([(timeline, 0.0)]),
        "notes": [*_notes(timeline, bubbles), *(_UNFITTED if fit == "too short" else ())],
    }


def _throughput(timeline: Timeline, wall_s: float) -> Report:
    completed = _completed(timeline)
    failed = len(timeline.finished) - len(completed) + timeline.rows_refused
    prompt_tokens = sum(request.prompt_tokens for request in completed)
    output_tokens = sum(request.output_tokens for request in completed)
    chunks = sum(event.num_chunks for event in timeline.issued[: timeline.num_returned])
    computed = sum(sum(_of_returned(timeline, name)) for name in ("prefill_tokens", "decodes"))
    return {
        "requests": len(timeline.arrived) + timeline.rows_refused,
        "completed": len(completed),
        "failed": failed,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "total_tokens_per_s": _per_second(prompt_tokens + output_tokens, wall_s),
        "output_tokens_per_s": _per_second(output_tokens, wall_s),
        "computed_tokens_per_s": _per_second(computed, wall_s),
        "chunk_throughput": _per_second(chunks, wall_s),
    }


def _completed(timeline: Timeline) -> list[RequestFinished]:
    return [request for request in timeline.finished if request.finish_reason != "error"]


def _of_returned(timeline: Timeline, name: str) -> Sequence[int]:
    """Return the values of a field of Issued, of the microbatches whose result is back."""
    values: Sequence[int] = timeline.issued.column(name)[: timeline.num_returned]
    return values


def _prefix_cache(timeline: Timeline, cost: CostModel | None) -> Report | None:
    """Return the figures of the prefix cache; None if the run had none.

    Requests that got no output without computing anything have not looked for pages.
    """
    mode = timeline.stages[0].start.prefix_cache
    if mode == "off":
        return None
    started = [request for request in _completed(timeline) if request.first_issue_s is not None]
    prompt_tokens = sum(request.prompt_tokens for request in started)
    cached_tokens = sum(request.cached_tokens for request in started)
    saved_s = None if cost is None else sum(cost.prefix_seconds(request.cached_tokens) for request in started)
    return {
        "mode": mode,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "resumed_tokens": sum(_of_returned(timeline, "resumed_tokens")),
        "computed_prompt_tokens": sum(_of_returned(timeline, "prefill_tokens")),
        "evictions": sum(_of_returned(timeline, "evictions")),
        "idle_pages_most": max(_of_returned(timeline, "idle_pages"), default=0),
        "saved_compute_s": saved_s,
    }


def whole_run(replicas: Sequence[tuple[Timeline, float]]) -> dict[str, Report]:
    """Return the key `whole_run`: the counts and rates of the whole run, if a trace holds only its first part.

    Return an empty dictionary if no trace was cut, or if a replica ended without its totals.

    Args:
        replicas: for each replica, its timeline, and the seconds from its leader's clock to the run's clock.
    """
    parts = [(timeline.totals, offset_s) for timeline, offset_s in replicas if timeline.totals is not None]
    if len(parts) < len(replicas) or not any(timeline.is_cut for timeline, _ in replicas):
        return {}
    begins = [part.first_issue_s + offset_s for part, offset_s in parts if part.first_issue_s is not None]
    ends = [part.last_result_s + offset_s for part, offset_s in parts if part.last_result_s is not None]
    wall_s = max(ends) - min(begins) if ends and begins else 0.0
    sums = {name: sum(getattr(part, name) for part, _ in parts) for name in _SUMS}
    tokens = sums["prompt_tokens"] + sums["output_tokens"]
    rates = {
        "total_tokens_per_s": _per_second(tokens, wall_s),
        "output_tokens_per_s": _per_second(sums["output_tokens"], wall_s),
    }
    return {"whole_run": {**sums, "wall_s": wall_s, **rates}}


def _per_second(count: int, wall_s: float) -> float | None:
    return count / wall_s if wall_s > 0 else None


def percentiles(values: Iterable[float]) -> Report:
    spread = Spread.of(values)
    return {"p50": spread.p50, "p90": spread.p90, "p99": spread.p99}


def _stage_report(stage: StageTimeline, measured: StageBubbles) -> Report:
    return {
        "stage": stage.start.stage,
        "host": stage.start.host,
        "layers": list(stage.start.layers),
        **asdict(measured),
        "cores_shared": measured.cores_shared,
        "collective_s": stage.collective_s,
        "mask_s": stage.mask_s,
        "peak_rss_bytes": stage.end.peak_rss_bytes if stage.end else None,
        "bytes_read": stage.end.bytes_read if stage.end else None,
        "graph_hit_rate": _hit_rate(stage.end.graph_hits, stage.end.graph_misses) if stage.end else None,
    }


def _hit_rate(hits: int | None, misses: int | None) -> float | None:
    """Return the share of microbatches that a CUDA graph computed; None without CUDA graphs or microbatches."""
    return hits / (hits + misses) if hits is not None and misses is not None and hits + misses else None


def _variation(timeline: Timeline, bubbles: Bubbles) -> Report:
    """Return two coefficients of variation over the microbatches of the steady window.

    One is of their times on the slowest stage, the other of their numbers of tokens.
    """
    stage = timeline.stages[bubbles.slowest_stage]
    positions = bubbles.steady_positions[bubbles.slowest_stage]
    issued = (timeline.issued.column(name) for name in ("microbatch", "prefill_tokens", "decodes"))
    tokens = {microbatch: prefill + decodes for microbatch, prefill, decodes in zip(*issued, strict=True)}
    seconds = timeline.microbatch_seconds(bubbles.slowest_stage)
    times = [seconds[position] for position in positions]
    ran = [stage.microbatches[position] for position in positions]
    sizes = [tokens[microbatch] for microbatch in ran if microbatch in tokens]
    return {"microbatch_time_cv": _cv(times), "microbatch_tokens_cv": _cv(sizes)}


def _cv(values: Sequence[float]) -> float | None:
    mean = fmean(values) if values else 0.0
    return pstdev(values, mean) / mean if mean > 0 else None


def _kv(timeline: Timeline) -> Report:
    """Return the use of KV pages. It is recorded at each issue, and counts until the next issue or the window's end."""
    settings = timeline.stages[0].start
    begin, window_end = timeline.window
    issued = [timeline.issued.column(name) for name in ("at_s", "pages_used", "tokens_held")]
    ends = [*(min(at_s, window_end) for at_s in issued[0][1:]), window_end]
    used_s = wasted_s = held_s = 0.0
    for at_s, pages_used, tokens_held, end in zip(*issued, ends, strict=False):
        if pages_used and end > at_s:
            held_s += end - at_s
            used_s += (end - at_s) * pages_used
            wasted_s += (end - at_s) * (1 - tokens_held / (pages_used * settings.page_size))
    return {
        "pages": settings.num_pages,
        "page_size": settings.page_size,
        "peak_used": max(timeline.issued.column("pages_used"), default=0),
        "mean_used": used_s / (window_end - begin) if window_end > begin else None,
        "fragmentation": wasted_s / held_s if held_s > 0 else None,
    }


def _clock_uncertainty(stage: StageTimeline) -> float:
    at_end = stage.end.clock_uncertainty_s if stage.end else 0.0
    return max(stage.start.clock_uncertainty_s, at_end)


def _notes(timeline: Timeline, bubbles: Bubbles) -> list[str]:
    """Return warnings about the figures, such as stages that shared cores. Empty if nothing is in doubt."""
    measured = list(enumerate(bubbles.stages))
    shared = {i: stage.cpu_ratio for i, stage in measured if stage.cores_shared}
    open_sums = {i: stage.closing_error for i, stage in measured if stage.closing_error > _CLOSING_TOLERANCE}
    endless = [i for i, stage in enumerate(timeline.stages) if stage.end is None]
    notes = []
    if shared:
        notes.append(f"cores were shared ({_by_stage(shared)} CPU time in compute spans): the bubble is understated")
    if open_sums:
        notes.append(
            f"states do not add up to the wall time (off by {_by_stage(open_sums)}): compute spans overlap, "
            "the bubble cannot be trusted"
        )
    if timeline.is_cut:
        notes.append(_cut_note(timeline))
    if endless:
        stages = ", ".join(map(str, endless))
        notes.append(f"no end in the trace of stage {stages}: the run goes on or was killed")
    return notes


def _cut_note(timeline: Timeline) -> str:
    """Return the warning that names the part of the run that the figures cover."""
    slow = any(stage.cut == "queue" for stage in timeline.stages)
    why = "the disk did not take events in time" if slow else "a trace has its largest size"
    part, totals = f"the first {timeline.num_returned:,}", timeline.totals
    if totals is None:
        return f"{why}: these figures are of {part} microbatches"
    return (
        f"{why}: these figures are of {part} of {totals.microbatches:,} microbatches; of the whole run "
        f"{totals.completed:,} of {totals.requests:,} requests are ok, with {totals.prompt_tokens:,} prompt and "
        f"{totals.output_tokens:,} output tokens"
    )


def _by_stage(shares: Mapping[int, float | None]) -> str:
    return ", ".join(f"stage {stage}: {share:.0%}" for stage, share in shares.items())
