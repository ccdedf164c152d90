"""The cost model of a run, fitted to the compute spans that its stages recorded.

    t = a0 + a1 * tiles(n) + a2 * sum(x*L + x*x/2) + a3 * sum(KV) + (a4 + head_s) * decodes

core/cost/model.py defines the symbols. Each stage is fitted separately, by least squares on relative errors, with
coefficients of at least 0. In several rounds, spans that do not fit the others get less weight (Huber's loss). So short
disturbances of the machine hardly count. If times vary, that fit is below the mean by about twice their relative
variance. So each stage is scaled at the end, until its modelled total equals the measured one.
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
from sarathi_pp.core.request_index import SEQUENCE_PATTERN, index_of
from sarathi_pp.sim.pipeline import Link, Links

# Shapes of the cost of linear layers, as cost models without stages: proportional to the tokens, then with a ridge,
# then with tiles.
_PLAIN = CostModel(1, ())
_RIDGES = tuple(CostModel(1, (), ridge) for ridge in (4, 8, 12, 16))
_TILES = tuple(CostModel(tile, ()) for tile in (16, 32, 64, 128, 256))
# The error of a shape must be below that of a simpler shape times this factor. With noise, some tile always fits a
# little better, and replaces the fixed cost of a microbatch. On a CPU, the fixed cost of a stage is 5 ms without a
# tile, and 0 with a tile of 16. That tile fits because a few tokens wait for the weights. With it, `balanced` makes
# four times the number of microbatches.
_GAIN = 0.9
# Errors up to this value count as 0.
_EXACT = 1e-9
# Least number of microbatches for a fit of five coefficients.
_LEAST_SPANS = 8
# Of more microbatches, every second, third, ... one is used, because the others would add nothing new.
_MOST_SPANS = 4096
# Rounds in which spans that do not fit get less weight.
_ROUNDS = 12
# Rounds to find the latency of an edge. The first guess is the shortest transfer. In the last rounds it hardly changes.
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

_PREFILL_CHUNK = re.compile(SEQUENCE_PATTERN + r"(?:\.\d+)?:(\d+)\+(\d+)")

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost model and its error.

    Attributes:
        model: the cost model.
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
        sampled: for each microbatch, the number of tokens that were drawn in it.
        seconds: for each stage, a vector with the time of each microbatch. The time of an LM head counts on the last
            stage, even if the first one computed it.
        layers: for each stage, its layers as [first, end).
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
        """Return the spans of the microbatches for which the mask is True."""
        loads = [load for load, yes in zip(self.loads, mask, strict=True) if yes]
        return Spans(loads, self.sampled[mask], [seconds[mask] for seconds in self.seconds], self.layers)

    def ratios(self, model: CostModel) -> list[Vector]:
        """Return, for each stage, a vector of modelled / measured seconds over the microbatches."""
        return [
            np.array([model.seconds(stage, load) for load in self.loads]) / seconds
            for stage, seconds in enumerate(self.seconds)
        ]


def fit_cost(timeline: Timeline) -> Fit | None:
    """Return the cost model of one run, for its own report; None if it has fewer than 8 microbatches.

    If a factor of the formula was the same in all microbatches, its coefficient is almost arbitrary. So the model is
    valid only for loads like those of the run.
    """
    if timeline.num_returned < _LEAST_SPANS:
        return None
    spans = Spans.of(timeline)
    return assess(fit_spans(spans), spans)


def assess(model: CostModel, spans: Spans) -> Fit:
    """Return a cost model with its mean error on these spans, for each stage."""
    return Fit(model, tuple(float(np.abs(ratios - 1).mean()) for ratios in spans.ratios(model)))


def fit_spans(spans: Spans) -> CostModel:
    """Return the cost model that is fitted to these spans.

    Its linear layers take time in proportion to the tokens. If the best ridge or tile lowers the error by more than
    10 %, it has this ridge or tile.
    """
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
    """Return one link (latency and rate) for all edges between neighbouring stages.

    A single stage has no such edge. Then return a link that takes no time.

    Args:
        counted: for each microbatch, True if its transfers count.
        row_bytes: bytes of one token's activations.
    """
    edges = [edge.chosen(counted) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    return _fit_edge(_Transfers.joined(edges)) if edges else EdgeLink(0.0, _MOST_BYTES_PER_S)


def measure_links(timeline: Timeline, counted: Mask, row_bytes: int) -> list[EdgeLink]:
    """Return one link (latency and rate) per edge. The edge from the last stage back to the first comes last.

    The messages back are small, so all their time is latency.

    Args:
        counted: for each microbatch, True if its transfers count.
        row_bytes: bytes of one token's activations.
    """
    forward = [_fit_edge(edge.chosen(counted)) for edge in _forward_edges(timeline, row_bytes, len(counted))]
    ends = np.array(timeline.stages[-1].ends[: len(counted)])
    back = np.array(timeline.back_s()[: len(counted)]) - ends
    return [*forward, EdgeLink(max(0.0, float(np.median(back[counted]))), _MOST_BYTES_PER_S)]


def measure_host(timeline: Timeline, counted: Mask) -> float:
    """Return the median seconds from the time when a stage could start a microbatch until it computes.

    In this time, Python on the host sends, receives and prepares.

    Args:
        counted: for each microbatch, True if it counts.
    """
    gaps = []
    for stage in timeline.stages:
        arrived, starts, ends = (np.array(of[: len(counted)]) for of in (stage.arrived, stage.starts, stage.ends))
        could = np.maximum(arrived, np.concatenate([[-np.inf], ends[:-1]]))
        gaps.append((starts - could)[counted])
    return max(0.0, float(np.median(np.concatenate(gaps))))


def fit_links(timeline: Timeline) -> Links:
    """Return the links of one run for the simulator: one per edge, because edges between hosts are slower than others.

    Their rates are in tokens per second, so the size of a token's activations need not be known.
    """
    found = measure_links(timeline, np.ones(timeline.num_returned, dtype=bool), row_bytes=1)
    return tuple(Link(fit.latency_s, fit.bytes_per_s, token_bytes=1) for fit in found)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """The transfers over one edge, in the order of microbatches.

    Attributes:
        sizes: size of each message in bytes.
        seconds: time from the end of the compute span until the arrival at the next stage.
        after_s: time from the arrival of the previous message until this arrival; infinite for the first message.
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
    """Return the transfers of the first `count` microbatches over each edge from a stage to the next."""
    sizes = np.array([event.num_tokens * row_bytes for event in timeline.issued[:count]], dtype=float)
    found = []
    for upstream, stage in zip(timeline.stages, timeline.stages[1:], strict=False):
        arrived, sent = np.array(stage.arrived[:count]), np.array(upstream.ends[:count])
        found.append(_Transfers(sizes, arrived - sent, np.diff(arrived, prepend=-np.inf)))
    return found


def _fit_edge(transfers: _Transfers) -> EdgeLink:
    """Fit the latency and the rate of an edge to its transfers.

    A message may find the link busy, because the previous message is still on it. Then it takes the time from the
    previous arrival to its own arrival, without the latency. To decide which messages find the link busy, the latency
    must be known. So latency and rate are fitted in several rounds.
    """
    latency_s = float(transfers.seconds.min(initial=np.inf))
    rate = 0.0
    for _ in range(_LINK_ROUNDS):
        queued = transfers.seconds > transfers.after_s + latency_s
        taken = np.where(queued, transfers.after_s, transfers.seconds)
        latency_s, rate = _robust(np.stack([~queued, transfers.sizes], axis=1).astype(float), taken).tolist()
    return EdgeLink(latency_s, 1 / max(rate, 1 / _MOST_BYTES_PER_S))


def _prompts_ended(text: str, prompts: dict[int, int]) -> int:
    """Return the number of prefill chunks in a printed microbatch that end their prompt. Each of them draws a token.

    Args:
        text: the printed microbatch.
        prompts: number of prompt tokens by index of the sequence.
    """
    chunks = _PREFILL_CHUNK.findall(text)
    return sum(int(begin) + int(count) == prompts.get(index_of(*name)) for *name, begin, count in chunks)


def _seconds(stage: StageTimeline, count: int) -> Vector:
    """Return the seconds of a stage's first `count` compute spans. A span of length 0 counts as a nanosecond."""
    lengths = np.array(stage.ends[:count]) - np.array(stage.starts[:count])
    positive: Vector = np.maximum(lengths, 1e-9)
    return positive


def _fit_shape(shape: CostModel, spans: Spans) -> tuple[float, list[StageCost]]:
    """Fit the coefficients of all stages for one shape. Return the mean error, and the cost of each stage.

    The coefficient a4 includes the LM head here.
    """
    design = np.array([shape.row(load) for load in spans.loads])
    stages, errors = [], []
    for layers, seconds in zip(spans.layers, spans.seconds, strict=True):
        coefficients = _robust_relative(design, seconds)
        errors.append(float(np.abs(design @ coefficients / seconds - 1).mean()))
        a0, a1, a2, a3, a4 = coefficients.tolist()
        stages.append(StageCost(layers, a0, a1, a2, a3, a4))
    return sum(errors) / len(errors), stages


def _to_total(shape: CostModel, stage: StageCost, loads: Sequence[Load], seconds: Vector) -> StageCost:
    """Return the stage with all coefficients times one factor, so that modelled and measured times have the same total.

    A span that is off by more than three standard deviations counts as off by three. The excess is a disturbance.

    Args:
        seconds: measured time of each microbatch.
    """
    model = replace(shape, stages=(stage,))
    modelled = np.array([model.seconds(0, load) for load in loads])
    if not modelled.all():
        return stage
    off = without_outliers(seconds / modelled - 1)
    factor = 1 + float((off * modelled).sum() / modelled.sum())
    return stage.scaled(factor)


def without_outliers(off: Vector) -> Vector:
    """Return errors after clipping them to three standard deviations. They must be spread around 0."""
    bound = _MOST_OFF * MEDIAN_TO_SIGMA * float(np.median(np.abs(off)))
    return off.clip(-bound, bound)


def _robust_relative(design: Vector, seconds: Vector) -> Vector:
    """Return the coefficients that `_robust` finds for relative errors."""
    return _robust(design / seconds[:, None], np.ones(len(seconds)))


def _robust(design: Vector, target: Vector) -> Vector:
    """Return coefficients c of at least 0 for which design @ c is nearly the target, by Huber's loss."""
    # The columns differ by many orders of magnitude. On a common scale, the solver stops at the right point.
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
    """Return the stages, after the last one's cost of a decode is divided between its layers (a4) and LM head (head_s).

    The last stage's layers are assumed to cost the same as layers of the other stages. If there is no other stage, the
    LM head's cost comes from microbatches without decodes in which a prompt ends, because such a prompt draws a token
    too. If there are none, that cost is 0.
    """
    *others, last = stages
    if others:
        rate = sum(stage.a4 for stage in others) / sum(_num_layers(stage) for stage in others)
        head_s = last.a4 - min(last.a4, rate * _num_layers(last))
    else:
        head_s = min(last.a4, _sampled_row_s(last, spans))
    return (*others, replace(last, a4=last.a4 - head_s, head_s=head_s))


def _sampled_row_s(stage: StageCost, spans: Spans) -> float:
    """Return the seconds that a drawn token adds to a microbatch, from the microbatches without decodes."""
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
