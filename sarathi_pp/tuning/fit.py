"""The cost model of a run, fitted to the compute spans that its stages recorded.

    t = a0 + a1 * tiles(n) + a2 * sum(x*L + x*x/2) + a3 * sum(KV) + (a4 + head_s) * decodes

One stage at a time: least squares on relative errors, coefficients of at least 0, spans that do not fit the others
given less weight in a few rounds (Huber's loss), so that what else the machine did for a moment does not count. That
fit lies below the mean where times vary, by about twice their relative variance; so each stage is scaled at the end to
take as long in all as was measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sarathi_pp.analysis.timeline import StageTimeline, Timeline
from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.cost.profile import EdgeLink
from sarathi_pp.sim.pipeline import Link, Links

# Shapes without stages: plain proportionality, then those that linear layers may have instead.
_PLAIN = CostModel(1, ())
_RIDGES = tuple(CostModel(1, (), ridge) for ridge in (4, 8, 12, 16))
_TILES = tuple(CostModel(tile, ()) for tile in (16, 32, 64, 128, 256))
# A shape must fit better than a simpler one by this factor: with noise some tile always does, a little, and takes the
# place of what a microbatch costs by itself. A stage of a CPU has 5 ms of that without a tile and nothing with one of
# 16, which fits because a few tokens wait for the weights; told so, `balanced` makes four times as many microbatches.
_GAIN = 0.9
# An error that is none.
_EXACT = 1e-9
# Fewer microbatches than this say nothing about five coefficients.
_LEAST_SPANS = 8
# More than this say nothing new.
_MOST_SPANS = 4096
_ROUNDS = 12
# From the smallest of all transfers as the latency to one that no longer moves.
_LINK_ROUNDS = 4
# Huber's: errors beyond this many standard deviations count linearly.
_OUTLYING = 1.345
# Standard deviations at which a stage's total cuts spans off. With 2, a spread of 30 % would lose 1.6 % of it, with 3
# 0.4 %; where 6 % of the spans take five times as long, 3 lets the total grow by 0.6 %, 5 by 1 %, no bound by 25 %.
_MOST_OFF = 3.0
# The median of |x| over a normal x is this share of its standard deviation.
MEDIAN_TO_SIGMA = 1.4826

# Links faster than this are not worth telling apart: JSON has no infinity.
_MOST_BYTES_PER_S = 1e15

_PREFILL_CHUNK = re.compile(r"s(\d+)(?:\.\d+)?:(\d+)\+(\d+)")

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """stage_errors: mean over spans of |modelled - measured| / measured. error: their mean over stages."""

    model: CostModel
    stage_errors: tuple[float, ...]

    @property
    def error(self) -> float:
        return sum(self.stage_errors) / len(self.stage_errors)


@dataclass(frozen=True, slots=True)
class Spans:
    """What microbatches asked and what they took.

    sampled: rows drawn from by each. seconds: by stage, each a vector over the microbatches; a head counts on the last
    one, wherever it was computed. layers: of the stages.
    """

    loads: Sequence[Load]
    sampled: Vector
    seconds: Sequence[Vector]
    layers: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, timeline: Timeline) -> Spans:
        count = timeline.num_returned
        issued = timeline.issued[:count]
        prompts = {request.index: request.prompt_tokens for request in timeline.arrived}
        ends = [_prompts_ended(event.text, prompts) for event in issued]
        loads = [event.load for event in issued]
        seconds = [_seconds(stage, count) for stage in timeline.stages]
        for microbatch, head_s in timeline.stages[0].heads.seconds().items():
            if microbatch < count:
                seconds[-1][microbatch] += head_s
        return cls(
            loads,
            np.array([load.decodes + ended for load, ended in zip(loads, ends, strict=True)], dtype=float),
            seconds,
            [stage.start.layers for stage in timeline.stages],
        )

    def chosen(self, mask: Mask) -> Spans:
        loads = [load for load, yes in zip(self.loads, mask, strict=True) if yes]
        return Spans(loads, self.sampled[mask], [seconds[mask] for seconds in self.seconds], self.layers)

    def ratios(self, model: CostModel) -> list[Vector]:
        """Modelled over measured seconds, by stage."""
        return [
            np.array([model.seconds(stage, load) for load in self.loads]) / seconds
            for stage, seconds in enumerate(self.seconds)
        ]


def fit_cost(timeline: Timeline) -> Fit | None:
    """The model of one run, for its own report. None for a run with fewer than 8 microbatches.

    Coefficients of what never varied are as good as arbitrary: the model interpolates within what the run has seen.
    """
    if timeline.num_returned < _LEAST_SPANS:
        return None
    spans = Spans.of(timeline)
    return assess(fit_spans(spans), spans)


def assess(model: CostModel, spans: Spans) -> Fit:
    """How far a model is off on these spans."""
    return Fit(model, tuple(float(np.abs(ratios - 1).mean()) for ratios in spans.ratios(model)))


def fit_spans(spans: Spans) -> CostModel:
    """The plain model, or that with the ridge or the tile that fits best, where it fits better by enough."""
    stride = -(-len(spans.loads) // _MOST_SPANS)
    spans = spans.chosen(np.arange(len(spans.loads)) % stride == 0)
    shape = _PLAIN
    error, stages = _fit_shape(shape, spans)
    for others in (_RIDGES, _TILES):
        fits = [(*_fit_shape(other, spans), other) for other in others]
        best_error, best_stages, best = min(fits, key=itemgetter(0))
        if best_error < _GAIN * error - _EXACT:
            error, stages, shape = best_error, best_stages, best
    scaled = [
        _to_total(shape, stage, spans.loads, seconds) for stage, seconds in zip(stages, spans.seconds, strict=True)
    ]
    return replace(shape, stages=_with_head(scaled, spans))


def measure_link(timeline: Timeline, counted: Mask, row_bytes: int) -> EdgeLink:
    """One link for all edges between neighbouring stages. A single stage has none.

    counted: the microbatches to go by. row_bytes: one token's activations.
    """
    edges = [edge.chosen(counted) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    return _fit_edge(_Transfers.joined(edges)) if edges else EdgeLink(0.0, _MOST_BYTES_PER_S)


def measure_links(timeline: Timeline, counted: Mask, row_bytes: int) -> list[EdgeLink]:
    """Each edge by itself, the return edge last: over that nothing goes that takes long, so all of it is latency."""
    forward = [_fit_edge(edge.chosen(counted)) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    ends = np.array(timeline.stages[-1].ends[: len(counted)])
    back = np.array(timeline.back_s()[: len(counted)]) - ends
    return [*forward, EdgeLink(max(0.0, float(np.median(back[counted]))), _MOST_BYTES_PER_S)]


def measure_host(timeline: Timeline, counted: Mask) -> float:
    """Seconds that a stage lets pass before it computes what is there: sends, reads and prepares. The median."""
    gaps = []
    for stage in timeline.stages:
        arrived, starts, ends = (np.array(of[: len(counted)]) for of in (stage.arrived, stage.starts, stage.ends))
        could = np.maximum(arrived, np.concatenate([[-np.inf], ends[:-1]]))
        gaps.append((starts - could)[counted])
    return max(0.0, float(np.median(np.concatenate(gaps))))


def fit_links(timeline: Timeline) -> Links:
    """The links of one run, by tokens, whatever one of them weighs. Each by itself: those between hosts are slow."""
    found = measure_links(timeline, np.ones(timeline.num_returned, dtype=bool), row_bytes=1)
    return tuple(Link(fit.latency_s, fit.bytes_per_s, token_bytes=1) for fit in found)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """What crossed an edge, by microbatch, in order. seconds: from the end of its compute until it had arrived.
    after_s: from its arrival back to that of the one before; infinite for the first.
    """

    sizes: Vector
    seconds: Vector
    after_s: Vector

    def chosen(self, mask: Mask) -> _Transfers:
        return _Transfers(self.sizes[mask], self.seconds[mask], self.after_s[mask])

    @classmethod
    def joined(cls, edges: Sequence[_Transfers]) -> _Transfers:
        columns = ([getattr(edge, name) for edge in edges] for name in ("sizes", "seconds", "after_s"))
        return cls(*map(np.concatenate, columns))


def _forward_edges(timeline: Timeline, row_bytes: int, count: int) -> list[_Transfers]:
    sizes = np.array([event.num_tokens * row_bytes for event in timeline.issued[:count]], dtype=float)
    found = []
    for upstream, stage in zip(timeline.stages, timeline.stages[1:], strict=False):
        arrived, sent = np.array(stage.arrived[:count]), np.array(upstream.ends[:count])
        found.append(_Transfers(sizes, arrived - sent, np.diff(arrived, prepend=-np.inf)))
    return found


def _fit_edge(transfers: _Transfers) -> EdgeLink:
    """A message that found the link taken says how long it took it up itself: from the arrival before to its own.

    Which ones did is known once the latency is: those that were ready before the one before them had left the link.
    """
    latency_s = float(transfers.seconds.min(initial=np.inf))
    rate = 0.0
    for _ in range(_LINK_ROUNDS):
        queued = transfers.seconds > transfers.after_s + latency_s
        taken = np.where(queued, transfers.after_s, transfers.seconds)
        latency_s, rate = _robust(np.stack([~queued, transfers.sizes], axis=1).astype(float), taken).tolist()
    return EdgeLink(latency_s, 1 / max(rate, 1 / _MOST_BYTES_PER_S))


def _prompts_ended(text: str, prompts: dict[int, int]) -> int:
    """Prefill chunks of a printed microbatch that reach the end of their prompt, and so draw a token."""
    return sum(int(b) + int(n) == prompts.get(int(s)) for s, b, n in _PREFILL_CHUNK.findall(text))


def _seconds(stage: StageTimeline, count: int) -> Vector:
    """Span lengths; a span too short for the clock counts as one of its ticks."""
    lengths = np.array(stage.ends[:count]) - np.array(stage.starts[:count])
    positive: Vector = np.maximum(lengths, 1e-9)
    return positive


def _fit_shape(shape: CostModel, spans: Spans) -> tuple[float, list[StageCost]]:
    """Mean error, and the stages with all that a decode costs in a4."""
    design = np.array([shape.row(load) for load in spans.loads])
    stages, errors = [], []
    for layers, seconds in zip(spans.layers, spans.seconds, strict=True):
        coefficients = _robust_relative(design, seconds)
        errors.append(float(np.abs(design @ coefficients / seconds - 1).mean()))
        a0, a1, a2, a3, a4 = coefficients.tolist()
        stages.append(StageCost(layers, a0, a1, a2, a3, a4))
    return sum(errors) / len(errors), stages


def _to_total(shape: CostModel, stage: StageCost, loads: Sequence[Load], seconds: Vector) -> StageCost:
    """The stage with all coefficients changed alike, so that its spans add up to the measured ones.

    A span further off than three standard deviations counts as that far off: the rest is a disturbance, not the stage.
    """
    model = replace(shape, stages=(stage,))
    modelled = np.array([model.seconds(0, load) for load in loads])
    if not modelled.all():
        return stage
    off = without_outliers(seconds / modelled - 1)
    factor = 1 + float((off * modelled).sum() / modelled.sum())
    return stage.scaled(factor)


def without_outliers(off: Vector) -> Vector:
    """Errors around 0, those beyond three standard deviations cut to as much."""
    bound = _MOST_OFF * MEDIAN_TO_SIGMA * float(np.median(np.abs(off)))
    return off.clip(-bound, bound)


def _robust_relative(design: Vector, seconds: Vector) -> Vector:
    """The same on relative errors."""
    return _robust(design / seconds[:, None], np.ones(len(seconds)))


def _robust(design: Vector, target: Vector) -> Vector:
    """Coefficients c of at least 0 for which design @ c is nearly the target, by Huber's loss."""
    # Columns differ by many orders of magnitude: on one scale the solver stops where it should.
    scale = np.maximum(design.max(axis=0), 1e-30)
    scaled = design / scale
    least = max(1e-9 * float(np.abs(target).max()), 1e-30)
    weights = np.ones(len(scaled))
    for _ in range(_ROUNDS):
        coefficients = nnls(scaled * weights[:, None], target * weights)[0]
        off = np.abs(scaled @ coefficients - target)
        bound = max(_OUTLYING * MEDIAN_TO_SIGMA * float(np.median(off)), least)
        weights = np.sqrt(bound / np.maximum(off, bound))
    solution: Vector = coefficients / scale
    return solution


def _with_head(stages: list[StageCost], spans: Spans) -> tuple[StageCost, ...]:
    """The last stage's cost of a decode, parted into its layers' and the head's.

    Layers cost there what they cost on the other stages. A single stage is asked for prompts that end without a decode,
    which draw a token too; where none did, nothing can be told.
    """
    *others, last = stages
    if others:
        rate = sum(stage.a4 for stage in others) / sum(_num_layers(stage) for stage in others)
        head_s = last.a4 - min(last.a4, rate * _num_layers(last))
    else:
        head_s = min(last.a4, _sampled_row_s(last, spans))
    return (*others, replace(last, a4=last.a4 - head_s, head_s=head_s))


def _sampled_row_s(stage: StageCost, spans: Spans) -> float:
    """What a drawn token costs beside everything else, from the microbatches without decodes."""
    alone = np.array([load.decodes == 0 for load in spans.loads])
    prefills = spans.chosen(alone)
    if not prefills.sampled.any():
        return 0.0
    tokens = np.array([float(load.num_tokens) for load in prefills.loads])
    attention = np.array([load.prefill_attention for load in prefills.loads])
    design = np.stack([np.ones(len(tokens)), tokens, attention, prefills.sampled], axis=1)
    return float(_robust_relative(design, prefills.seconds[0])[3])


def _num_layers(stage: StageCost) -> int:
    return stage.layers[1] - stage.layers[0]
