"""What the spans of a calibration run say of the machine: traces -> spans -> cost model, jitter, drift, links.

Every fifth microbatch is kept from the fit and used to say how far it is off. On a CPU that others use too, a span ends
late because its thread was not running: there the thread's own CPU time is what the stage took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Drift, EdgeLink
from sarathi_pp.errors import ConfigError
from sarathi_pp.trace.events import Compute, Event
from sarathi_pp.tuning.fit import (
    MEDIAN_TO_SIGMA,
    Fit,
    Spans,
    Vector,
    assess,
    fit_spans,
    measure_host,
    measure_link,
    measure_links,
    without_outliers,
)

_HELD_OUT = 5
# Below this share of its span the computing thread was kept from a core.
_OWN_CORE = 0.9
# Equal microbatches: the same counts, modelled times this close, and no more than so many microbatches apart.
_EQUAL = 0.02
_NEAR = 8
# Seconds in which the correlation of a stage's speed may fall to 1/e, and beyond which two spans say nothing of it.
_DRIFTS_S = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_FAR_S = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a calibration run says.

    fit: the cost model and its error over the microbatches kept from it, of which there are `held_out`.
    microbatches: measured ones. disturbed: share of spans in which the thread did not have a core of its own; None
    where that was not recorded. throughput: prompt tokens of a microbatch, and tokens a second on the slowest stage.
    link: one for all edges; links: each by itself, empty for a single stage. host_s: see Profile.
    """

    fit: Fit
    microbatches: int
    held_out: int
    disturbed: float | None
    jitter_cv: float
    drift: Drift
    link: EdgeLink
    links: tuple[EdgeLink, ...]
    host_s: float
    throughput: tuple[tuple[int, float], ...]


def measure(traces: Sequence[Sequence[Event]], warm_up: int, row_bytes: int) -> Measurement:
    """Fold the traces of a calibration, one a stage.

    warm_up: microbatches, from the first, that count for nothing. row_bytes: one token's activations.
    Raises ConfigError where there are too few microbatches to fit anything.
    """
    timeline = Timeline.read(traces)
    spans = Spans.of(timeline)
    position = np.arange(len(spans.loads))
    counted = position >= warm_up
    held_out = counted & (position % _HELD_OUT == _HELD_OUT - 1)
    if (counted & ~held_out).sum() < 2 * _HELD_OUT or not held_out.any():
        raise ConfigError(
            f"{counted.sum()} microbatches fitted in, too few to fit a cost model: there is room for hardly any tokens."
            "\n  try  a larger --kv-cache-memory, --max-num-seqs or --max-model-len"
        )
    own_cores, disturbed = _own_cores(spans, traces)
    model = fit_spans(own_cores.chosen(counted & ~held_out))
    measured = own_cores.chosen(counted)
    return Measurement(
        fit=assess(model, own_cores.chosen(held_out)),
        microbatches=int(counted.sum()),
        held_out=int(held_out.sum()),
        disturbed=disturbed,
        jitter_cv=_jitter(model, measured),
        drift=measure_drift(
            model, measured, [np.array(stage.starts)[: len(counted)][counted] for stage in timeline.stages]
        ),
        link=measure_link(timeline, counted, row_bytes),
        links=tuple(measure_links(timeline, counted, row_bytes)) if len(traces) > 1 else (),
        host_s=measure_host(timeline, counted),
        throughput=_throughput(model, measured),
    )


def _own_cores(spans: Spans, traces: Sequence[Sequence[Event]]) -> tuple[Spans, float | None]:
    """The spans as they would be on cores of their own, and the share of them that were not.

    A thread that computes without a break has as much CPU time as its span is long, or, among others of its stage, a
    share of it that is much the same in all undisturbed spans. In a sum over the ranks of its stage it waits for them,
    so what those took stays as it was.
    """
    seconds, shares = [], []
    for stage_s, trace in zip(spans.seconds, _by_stage(traces), strict=True):
        own_s = [event.cpu_s for event in trace[: len(stage_s)] if event.cpu_s is not None]
        if len(own_s) < len(stage_s):
            return spans, None
        summed_s = np.array([event.collective_s or 0.0 for event in trace[: len(stage_s)]])
        share = np.array(own_s) / np.maximum(stage_s - summed_s, 1e-9)
        usual = min(1.0, float(np.quantile(share, 0.95)))
        disturbed = share < _OWN_CORE * usual
        shares.append(float(disturbed.mean()))
        seconds.append(np.where(disturbed, np.maximum(np.array(own_s) / usual + summed_s, 1e-9), stage_s))
    return replace(spans, seconds=seconds), sum(shares) / len(shares)


def _by_stage(traces: Sequence[Sequence[Event]]) -> list[list[Compute]]:
    """Compute spans of each trace, in order of microbatch; traces are in order of stage."""
    return [
        sorted((event for event in trace if isinstance(event, Compute)), key=lambda span: span.microbatch)
        for trace in traces
    ]


def _jitter(model: CostModel, spans: Spans) -> float:
    """Coefficient of variation of equal microbatches: the usual difference of two of them, by a stage's own error.

    Of near ones, so that a machine that slows down is no jitter; medians, so that a few disturbed spans are none, and
    by the time that they took: small ones vary most, and a stage that waits for one waits for little.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, load in enumerate(spans.loads):
        groups.setdefault((load.prefill_tokens, load.decodes), []).append(index)
    found = []
    for modelled, off in zip(_modelled(model, spans), _own_errors(model, spans), strict=True):
        pairs = [
            (a, b)
            for members in groups.values()
            for index, a in enumerate(members)
            for b in members[index + 1 :]
            if b - a <= _NEAR and abs(modelled[a] / modelled[b] - 1) < _EQUAL
        ]
        if pairs:
            first, second = np.array(pairs).T
            usual = _weighted_median(np.abs(off[first] - off[second]), modelled[first])
            found.append(MEDIAN_TO_SIGMA * usual / 2**0.5)
    return sum(found) / len(found) if found else 0.0


def _modelled(model: CostModel, spans: Spans) -> list[Vector]:
    """Seconds of each span, by stage."""
    return [ratios * seconds for ratios, seconds in zip(spans.ratios(model), spans.seconds, strict=True)]


def _own_errors(model: CostModel, spans: Spans) -> list[Vector]:
    """By how much of the modelled time each span took longer than others of its stage, less what the same microbatch
    took longer on all stages.

    That is the model's error for such a microbatch, or the machine's speed where it moves slowly: it makes no stage
    wait for another, and on two cores of a virtual machine it is most of what spans vary by. A single stage has nobody
    to share with, and keeps both.
    """
    errors = []
    for ratios in spans.ratios(model):
        off = 1 / ratios - 1
        errors.append(without_outliers(off - np.median(off)))
    if len(errors) == 1:
        return errors
    shared = np.mean(errors, axis=0)
    taken_out = (1 - 1 / len(errors)) ** 0.5  # of each stage's own, a part is in the mean
    return [(off - shared) / taken_out for off in errors]


def _weighted_median(values: Vector, weights: Vector) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def measure_drift(model: CostModel, spans: Spans, starts_s: Sequence[Vector]) -> Drift:
    """How the stages' speed moves, by how their own errors on their spans go together in time.

    starts_s: of the spans, by stage. Two spans of like load err together because the model is off for both, so only
    pairs of unlike ones count, by the time that they took; the timetable has shuffled them.
    """
    sizes = np.array([(load.prefill_tokens, load.decodes) for load in spans.loads])
    unlike = np.triu((sizes[:, None] != sizes[None]).any(axis=2), 1)
    lags, products, weights = [], [], []
    for modelled, off, at_s in zip(_modelled(model, spans), _own_errors(model, spans), starts_s, strict=True):
        lag_s = at_s[None] - at_s[:, None]
        counted = unlike & (lag_s < _FAR_S)
        lags.append(lag_s[counted])
        products.append((off[:, None] * off[None])[counted])
        weights.append((modelled[:, None] * modelled[None])[counted])
    lag, product, weight = np.concatenate(lags), np.concatenate(products), np.concatenate(weights)
    fits = []
    for seconds in _DRIFTS_S:
        kept = np.exp(-lag / seconds)
        told = float((weight * kept) @ kept)
        variance = max(0.0, float((weight * product) @ kept) / told) if told else 0.0
        fits.append((float(weight @ np.square(product - variance * kept)), variance, seconds))
    _, variance, seconds = min(fits)
    return Drift(variance**0.5, seconds)


def _throughput(model: CostModel, spans: Spans) -> tuple[tuple[int, float], ...]:
    """Measured tokens a second of prompt tokens alone, their attention taken off, by size."""
    rates: dict[int, list[float]] = {}
    for index, load in enumerate(spans.loads):
        if load.decodes:
            continue
        linear_s = [
            seconds[index] - stage.a2 * load.prefill_attention
            for seconds, stage in zip(spans.seconds, model.stages, strict=True)
        ]
        if max(linear_s) > 0:
            rates.setdefault(load.prefill_tokens, []).append(load.prefill_tokens / max(linear_s))
    return tuple((size, float(np.median(rates[size]))) for size in sorted(rates))
