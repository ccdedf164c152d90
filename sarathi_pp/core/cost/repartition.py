"""The stages of a cost model cut anew: what embedding and head take stays at the ends, the rest is the layers'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.partition import StageSeconds


def repartition(cost: CostModel, layers: Sequence[tuple[int, int]]) -> CostModel:
    """The same model cut into other stages: embedding and head stay at the ends, layers take their share of the rest.

    Among as many stages as before each keeps its time a layer, since what makes one slower than another is mostly the
    machine below it; cut into another number of stages, layers keep the time that they had.

    layers: [first, end) of each stage, contiguous over the same layers.
    """
    if tuple(layers) == tuple(stage.layers for stage in cost.stages):
        return cost
    inner, embed, head = _without_ends(cost, len(layers))
    if len(layers) == len(inner.stages):
        stages = [_sum(span, [(stage, _count(span))]) for span, stage in zip(layers, inner.stages, strict=True)]
    else:
        stages = [_sum(span, ((stage, _shared(span, stage.layers)) for stage in inner.stages)) for span in layers]
    sampling_s = sum(stage.head_s for stage in cost.stages)
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head.a0, head_s=sampling_s)
    stages[0] = replace(stages[0], a0=stages[0].a0 + embed.a0, a1=stages[0].a1 + embed.a1)
    return replace(cost, stages=tuple(stages))


def stage_seconds(cost: CostModel, load: Load, num_stages: int) -> StageSeconds:
    """What a stage of a cut into so many would take for a load, as in `repartition`."""
    inner, embed, head = _without_ends(cost, num_stages)
    sampling_s = cost.stages[-1].head_s * load.decodes
    embed_s = embed.a0 + embed.a1 * cost.tiles(load.num_tokens)
    layer_s: list[float] = []  # of each stage
    for index, stage in enumerate(inner.stages):
        # Not below 0 by rounding: a stage takes no less for a layer more.
        layers_s = max(0.0, inner.seconds(index, load) - stage.head_s * load.decodes)
        layer_s.append(layers_s / _count(stage.layers))
    num_layers = cost.stages[-1].layers[1]

    def seconds(stage: int, first: int, end: int) -> float:
        if num_stages == len(layer_s):
            layers_s = (end - first) * layer_s[stage]
        else:
            parts = zip(inner.stages, layer_s, strict=True)
            layers_s = sum(_shared((first, end), own.layers) * own_s for own, own_s in parts)
        return layers_s + embed_s * (first == 0) + (head.a0 + sampling_s) * (end == num_layers)

    return seconds


# What tokens take of a microbatch of so many, from which a stage's speed can be told.
_TOKENS = 256
_FAIR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class _End:
    """What the first or the last stage takes beside its layers, of the coefficients that embedding and head go into."""

    a0: float = 0.0
    a1: float = 0.0


def _without_ends(cost: CostModel, num_stages: int) -> tuple[CostModel, _End, _End]:
    """The model without embedding and head, and those two, for a cut into so many stages.

    The head's weights are read for every microbatch: what the last stage has more of a0 than its layers would at the
    inner stages' rate, or the first one's, on a machine as fast as its time a token says, which the head has no part
    in. The embedding is told from the layers only where there are inner stages, and where stages keep their time a
    layer not at all: it is small, and a slow machine looks like a large one. head_s stays in place.
    """

    def told(stage: StageCost) -> bool:
        """Whether its time a token can be told: a fit leaves next to nothing, or noise, where time hardly grows."""
        tokens_s = stage.a1 * cost.tiles(_TOKENS)
        return tokens_s > _FAIR_SHARE * (stage.a0 + tokens_s)

    stages = list(cost.stages)
    head = embed = _End()
    inner = stages[1:-1]
    if len(stages) > 1:
        others = inner or stages[:1]
        slower = _rate(stages[-1:], "a1") / _rate(others, "a1") if all(map(told, [stages[-1], *others])) else 1.0
        head = _End(a0=_excess(stages[-1], slower * _rate(others, "a0"), "a0"))
        stages[-1] = replace(stages[-1], a0=stages[-1].a0 - head.a0)
    if inner and num_stages != len(stages):
        first = stages[0]
        embed = _End(_excess(first, _rate(inner, "a0"), "a0"), _excess(first, _rate(inner, "a1"), "a1"))
        stages[0] = replace(first, a0=first.a0 - embed.a0, a1=first.a1 - embed.a1)
    return replace(cost, stages=tuple(stages)), embed, head


def _rate(stages: Sequence[StageCost], name: str) -> float:
    """Of a coefficient, what a layer has."""
    found: float = sum(getattr(stage, name) for stage in stages) / sum(_count(stage.layers) for stage in stages)
    return found


def _excess(stage: StageCost, rate: float, name: str) -> float:
    """Of a coefficient, what is beyond that rate a layer."""
    found: float = max(0.0, getattr(stage, name) - rate * _count(stage.layers))
    return found


def _sum(span: tuple[int, int], parts: Iterable[tuple[StageCost, int]]) -> StageCost:
    """The cost of the layers of a span, so many like those of each stage, without what sampled rows cost."""
    cost = StageCost(span, 0.0, 0.0, 0.0, 0.0, 0.0)
    for stage, layers in parts:
        share = layers / _count(stage.layers)
        cost = replace(
            cost,
            a0=cost.a0 + share * stage.a0,
            a1=cost.a1 + share * stage.a1,
            a2=cost.a2 + share * stage.a2,
            a3=cost.a3 + share * stage.a3,
            a4=cost.a4 + share * stage.a4,
            page_bytes=cost.page_bytes + round(share * stage.page_bytes),
        )
    return cost


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Layers in both."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _count(span: tuple[int, int]) -> int:
    return span[1] - span[0]
