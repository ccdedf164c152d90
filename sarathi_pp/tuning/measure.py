"""The measurement of a machine by a calibration run: traces -> spans -> cost model, jitter, drift, links.

Every fifth microbatch is left out of the fit, and the error of the fit is measured on it. If other programs use the CPU
too, a span may end late because its thread was not running. Then the thread's own CPU time counts as the time of the
stage.
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

# One of this number of microbatches is left out of the fit.
_HELD_OUT = 5
# CPU time takes nearly the same share of every undisturbed span. If the share is below this part of the usual one, the
# computing thread had to wait for a core.
_OWN_CORE = 0.9
# Two microbatches count as equal if they have the same numbers of prefill tokens and decodes, their modelled times
# differ by less than the share _EQUAL, and at most _NEAR microbatches are from one to the other.
_EQUAL = 0.02
_NEAR = 8
# Candidates for the seconds in which the correlation of a stage's speed falls to 1/e. Two spans that are more than
# _FAR_S apart do not count.
_DRIFTS_S = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_FAR_S = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of a calibration run.

    Attributes:
        fit: the cost model, and its error over the microbatches that were left out of the fit.
        microbatches: number of measured microbatches.
        held_out: number of microbatches that were left out of the fit.
        disturbed: share of the spans in which the computing thread had to wait for a core; None if CPU times are
            unknown.
        jitter_cv: see Profile.
        drift: see Profile.
        link: one link for all edges.
        links: one link per edge; empty for a single stage.
        host_s: see Profile.
        throughput: pairs of a microbatch's prompt tokens and the tokens per second on the slowest stage.
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
    """Compute the measurement from the traces of a calibration run, one per stage.

    Args:
        warm_up: number of microbatches at the start that do not count.
        row_bytes: bytes of one token's activations.

    Raises:
        ConfigError: there are too few microbatches to fit a cost model.
    """
    timeline = Timeline.read(traces)
    spans = Spans.of(timeline)
    position = np.arange(len(spans.loads))
    counted = position >= warm_up
    held_out = counted & (position % _HELD_OUT == _HELD_OUT - 1)
    if (counted & ~held_out).sum() < 2 * _HELD_OUT or not held_out.any():
        raise ConfigError(
            f"{counted.sum()} microbatches were measured, too few to fit a cost model: there is room for few tokens."
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
    """Return the spans as if no thread had waited for a core, and the share of disturbed spans.

    The CPU time of a thread that computes without a break equals its span. If its stage has several threads, its CPU
    time is a share of the span. This share is nearly the same in all undisturbed spans. In a sum over the ranks of its
    stage, the thread waits for the other ranks. So the time of such sums stays as it was.

    If a span has no CPU time, all spans stay as they are, and the share is None.
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
    """Return the compute spans of each trace, in the order of microbatches. The traces must be in order of stages."""
    return [
        sorted((event for event in trace if isinstance(event, Compute)), key=lambda span: span.microbatch)
        for trace in traces
    ]


def _jitter(model: CostModel, spans: Spans) -> float:
    """Return the jitter: the coefficient of variation of the times of equal microbatches.

    It comes from the usual difference between the own errors (`_own_errors`) of two equal microbatches. Only
    microbatches near each other are compared, so that a machine that slows down does not count as jitter. The usual
    difference is a median, so that a few disturbed spans do not count. It is weighted by time: small microbatches vary
    most, and a stage that waits for one does not wait long.
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
    """Return the modelled seconds of all spans, by stage."""
    return [ratios * seconds for ratios, seconds in zip(spans.ratios(model), spans.seconds, strict=True)]


def _own_errors(model: CostModel, spans: Spans) -> list[Vector]:
    """Return the own error of each span: the extra time that only its own stage took, as a share of the modelled time.

    The extra time of a span is compared with the other spans of its stage. Then the mean extra time of the same
    microbatch on all stages is subtracted. That part is the model's error for such a microbatch, or a slow change of
    the machine's speed. It makes no stage wait for another. On two cores of a virtual machine, it is most of the
    variation of spans. If there is a single stage, nothing is subtracted.

    Returns:
        a vector over the microbatches for each stage.
    """
    errors = []
    for ratios in spans.ratios(model):
        off = 1 / ratios - 1
        errors.append(without_outliers(off - np.median(off)))
    if len(errors) == 1:
        return errors
    shared = np.mean(errors, axis=0)
    taken_out = (1 - 1 / len(errors)) ** 0.5  # the mean contains a part of each stage's own error
    return [(off - shared) / taken_out for off in errors]


def _weighted_median(values: Vector, weights: Vector) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def measure_drift(model: CostModel, spans: Spans, starts_s: Sequence[Vector]) -> Drift:
    """Return the drift (slow change) of the stages' speed, from the correlation of their own errors over time.

    Two spans of equal loads have similar errors, because the model is wrong for both. So only pairs of different loads
    count, weighted by their time. The timetable has shuffled the loads, so pairs of all loads exist at all distances.

    Args:
        starts_s: for each stage, the start of each span in seconds.
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
    """Return (prompt tokens, tokens per second) for each size of microbatches without decodes, in ascending order.

    The rate is that of the slowest stage. The modelled time of attention is subtracted.
    """
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
