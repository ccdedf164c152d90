"""The cost model of a run, fitted to the compute spans that its stages recorded.

    t = a0 + a1 * tiles(n) + a2 * sum(x*L + x*x/2) + a3 * sum(KV) + (a4 + head_s) * decodes

Each stage is fitted separately, by least squares on relative errors, with coefficients of at least 0. Spans that do
not fit the others get less weight in a few rounds (Huber's loss). So short disturbances of the machine do not count. If
times vary, that fit is below the mean by about twice their relative variance. So each stage is scaled at the end, and
its modelled total equals the measured one.
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

# Shapes without stages: plain proportionality, then the other shapes that linear layers may have.
_PLAIN = CostModel(1, ())
_RIDGES = tuple(CostModel(1, (), ridge) for ridge in (4, 8, 12, 16))
_TILES = tuple(CostModel(tile, ()) for tile in (16, 32, 64, 128, 256))
# A shape must fit better than a simpler one by this factor. With noise, some tile always fits a little better, and
# replaces the fixed cost of a microbatch. On a CPU, the fixed cost of a stage is 5 ms without a tile, and 0 with a tile
# of 16. That tile fits because a few tokens wait for the weights. With it, `balanced` makes four times the number of
# microbatches.
_GAIN = 0.9
# Errors up to this count as none.
_EXACT = 1e-9
# Fewer microbatches are not enough for five coefficients.
_LEAST_SPANS = 8
# More microbatches add nothing new.
_MOST_SPANS = 4096
_ROUNDS = 12
# Rounds to find the latency. It starts as the shortest transfer, and no longer changes in the end.
_LINK_ROUNDS = 4
# Huber's constant: errors beyond this number of standard deviations count linearly.
_OUTLYING = 1.345
# Number of standard deviations at which spans are cut for a stage's total. If times spread by 30 %, a limit of 2 loses
# 1.6 % of the total, and 3 loses 0.4 %. In another case, 6 % of the spans take five times as long. Then the total grows
# by 0.6 % with a limit of 3, by 1 % with 5, and by 25 % without a limit.
_MOST_OFF = 3.0
# The standard deviation of a normal x is this multiple of the median of |x|.
MEDIAN_TO_SIGMA = 1.4826

# Limit of measured rates. Faster links need not be distinguished, and JSON has no infinity.
_MOST_BYTES_PER_S = 1e15

_PREFILL_CHUNK = re.compile(r"s(\d+)(?:\.\d+)?:(\d+)\+(\d+)")

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost model and its error.

    Attributes:
        stage_errors: mean over the spans of |modelled - measured| / measured, for each stage.
    """

    model: CostModel
    stage_errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean of the stage errors."""
        return sum(self.stage_errors) / len(self.stage_errors)


@dataclass(frozen=True, slots=True)
class Spans:
    """The loads of microbatches, and the times that they took.

    Attributes:
        loads: load of each microbatch.
        sampled: number of rows from which a token was drawn, per microbatch.
        seconds: for each stage, a vector over the microbatches. An LM head counts on the last stage, even if the first
            one computed it.
        layers: [first, end) for each stage.
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
        """Return modelled over measured seconds, by stage."""
        return [
            np.array([model.seconds(stage, load) for load in self.loads]) / seconds
            for stage, seconds in enumerate(self.seconds)
        ]


def fit_cost(timeline: Timeline) -> Fit | None:
    """Return the cost model of one run, for its own report; None if it has fewer than 8 microbatches.

    A coefficient is almost arbitrary if its factor never varied. So the model is valid only for loads like the run's.
    """
    if timeline.num_returned < _LEAST_SPANS:
        return None
    spans = Spans.of(timeline)
    return assess(fit_spans(spans), spans)


def assess(model: CostModel, spans: Spans) -> Fit:
    """Return a model with its errors on these spans."""
    return Fit(model, tuple(float(np.abs(ratios - 1).mean()) for ratios in spans.ratios(model)))


def fit_spans(spans: Spans) -> CostModel:
    """Return the plain model, or one with the best ridge or tile, if that fits better by enough."""
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
    """Return one link for all edges between neighbouring stages. A single stage has no such edge.

    Args:
        counted: microbatches that count.
        row_bytes: size of one token's activations.
    """
    edges = [edge.chosen(counted) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    return _fit_edge(_Transfers.joined(edges)) if edges else EdgeLink(0.0, _MOST_BYTES_PER_S)


def measure_links(timeline: Timeline, counted: Mask, row_bytes: int) -> list[EdgeLink]:
    """Return one link per edge, the return edge last.

    The messages of the return edge are small, so their time is all latency.

    Args:
        counted: microbatches that count.
        row_bytes: size of one token's activations.
    """
    forward = [_fit_edge(edge.chosen(counted)) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    ends = np.array(timeline.stages[-1].ends[: len(counted)])
    back = np.array(timeline.back_s()[: len(counted)]) - ends
    return [*forward, EdgeLink(max(0.0, float(np.median(back[counted]))), _MOST_BYTES_PER_S)]


def measure_host(timeline: Timeline, counted: Mask) -> float:
    """Return the median seconds from the time when a stage could start a microbatch until it computes.

    The stage sends, reads and prepares in this time.
    """
    gaps = []
    for stage in timeline.stages:
        arrived, starts, ends = (np.array(of[: len(counted)]) for of in (stage.arrived, stage.starts, stage.ends))
        could = np.maximum(arrived, np.concatenate([[-np.inf], ends[:-1]]))
        gaps.append((starts - could)[counted])
    return max(0.0, float(np.median(np.concatenate(gaps))))


def fit_links(timeline: Timeline) -> Links:
    """Return the links of one run, one per edge, because edges between hosts are slow.

    Rates are in tokens per second, whatever the size of a token's activations is.
    """
    found = measure_links(timeline, np.ones(timeline.num_returned, dtype=bool), row_bytes=1)
    return tuple(Link(fit.latency_s, fit.bytes_per_s, token_bytes=1) for fit in found)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """The transfers over one edge, in the order of microbatches.

    Attributes:
        sizes: bytes.
        seconds: from the end of the compute span until the arrival.
        after_s: from the previous arrival until this one; infinite for the first transfer.
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
    """Fit the latency and the rate of an edge.

    A message that finds the link busy occupies it from the previous arrival until its own. It finds the link busy if it
    was ready before the previous message had left the link. To decide this, the latency must be known. So latency and
    rate are fitted in rounds.
    """
    latency_s = float(transfers.seconds.min(initial=np.inf))
    rate = 0.0
    for _ in range(_LINK_ROUNDS):
        queued = transfers.seconds > transfers.after_s + latency_s
        taken = np.where(queued, transfers.after_s, transfers.seconds)
        latency_s, rate = _robust(np.stack([~queued, transfers.sizes], axis=1).astype(float), taken).tolist()
    return EdgeLink(latency_s, 1 / max(rate, 1 / _MOST_BYTES_PER_S))


def _prompts_ended(text: str, prompts: dict[int, int]) -> int:
    """Return the number of prefill chunks in a printed microbatch that end their prompt, and so draw a token."""
    return sum(int(b) + int(n) == prompts.get(int(s)) for s, b, n in _PREFILL_CHUNK.findall(text))


def _seconds(stage: StageTimeline, count: int) -> Vector:
    """Return span lengths. A span that is too short for the clock counts as one tick."""
    lengths = np.array(stage.ends[:count]) - np.array(stage.starts[:count])
    positive: Vector = np.maximum(lengths, 1e-9)
    return positive


def _fit_shape(shape: CostModel, spans: Spans) -> tuple[float, list[StageCost]]:
    """Return the mean error and the stages, whose a4 holds the whole cost of a decode."""
    design = np.array([shape.row(load) for load in spans.loads])
    stages, errors = [], []
    for layers, seconds in zip(spans.layers, spans.seconds, strict=True):
        coefficients = _robust_relative(design, seconds)
        errors.append(float(np.abs(design @ coefficients / seconds - 1).mean()))
        a0, a1, a2, a3, a4 = coefficients.tolist()
        stages.append(StageCost(layers, a0, a1, a2, a3, a4))
    return sum(errors) / len(errors), stages


def _to_total(shape: CostModel, stage: StageCost, loads: Sequence[Load], seconds: Vector) -> StageCost:
    """Return the stage with all coefficients scaled alike, so that its spans add up to the measured ones.

    A span that is off by more than three standard deviations counts as off by three. The excess is a disturbance.
    """
    model = replace(shape, stages=(stage,))
    modelled = np.array([model.seconds(0, load) for load in loads])
    if not modelled.all():
        return stage
    off = without_outliers(seconds / modelled - 1)
    factor = 1 + float((off * modelled).sum() / modelled.sum())
    return stage.scaled(factor)


def without_outliers(off: Vector) -> Vector:
    """Return errors around 0, clipped to three standard deviations."""
    bound = _MOST_OFF * MEDIAN_TO_SIGMA * float(np.median(np.abs(off)))
    return off.clip(-bound, bound)


def _robust_relative(design: Vector, seconds: Vector) -> Vector:
    """Return the coefficients that `_robust` finds for relative errors."""
    return _robust(design / seconds[:, None], np.ones(len(seconds)))


def _robust(design: Vector, target: Vector) -> Vector:
    """Return coefficients c of at least 0 for which design @ c is nearly the target, by Huber's loss."""
    # Columns differ by many orders of magnitude. On a common scale, the solver stops at the right point.
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
    """Return the stages, with the last stage's cost of a decode divided between its layers and the LM head.

    Layers cost the same there as on the other stages. For a single stage, prompts that end in a microbatch without
    decodes give the LM head's cost, because they draw a token too. If there are none, that cost is 0.
    """
    *others, last = stages
    if others:
        rate = sum(stage.a4 for stage in others) / sum(_num_layers(stage) for stage in others)
        head_s = last.a4 - min(last.a4, rate * _num_layers(last))
    else:
        head_s = min(last.a4, _sampled_row_s(last, spans))
    return (*others, replace(last, a4=last.a4 - head_s, head_s=head_s))


def _sampled_row_s(stage: StageCost, spans: Spans) -> float:
    """Return the extra seconds of a drawn token, from the microbatches without decodes."""
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
