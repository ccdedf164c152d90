"""The stages of a cost model cut anew: what embedding and head take stays at the ends, the rest is the layers'."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost import CostModel, Load, StageCost


def recut(cost: CostModel, layers: Sequence[tuple[int, int]]) -> CostModel:
    """The same model cut into other stages: embedding and head stay at the ends, layers take their share of the rest.

    layers: [first, end) of each stage, contiguous over the same layers.
    """
    if tuple(layers) == tuple(stage.layers for stage in cost.stages):
        return cost
    inner, embed, head = _without_ends(cost)
    stages = [_shares(inner.stages, first, end) for first, end in layers]
    sampling_s = sum(stage.head_s for stage in cost.stages)
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head.a0, head_s=sampling_s)
    stages[0] = replace(stages[0], a0=stages[0].a0 + embed.a0, a1=stages[0].a1 + embed.a1)
    return CostModel(cost.tile, tuple(stages))


def stage_seconds(cost: CostModel, load: Load) -> Callable[[int, int], float]:
    """What a stage of the layers [first, end) would take for a load, as in `recut`."""
    inner, embed, head = _without_ends(cost)
    sampling_s = cost.stages[-1].head_s * load.decodes
    embed_s = embed.a0 + embed.a1 * math.ceil(load.num_tokens / cost.tile)
    layer_s: list[float] = []
    for index, stage in enumerate(inner.stages):
        first, end = stage.layers
        own_s = inner.seconds(index, load) - stage.head_s * load.decodes
        layer_s += [own_s / (end - first)] * (end - first)

    def seconds(first: int, end: int) -> float:
        ends_s = embed_s * (first == 0) + (head.a0 + sampling_s) * (end == len(layer_s))
        return sum(layer_s[first:end]) + ends_s

    return seconds


@dataclass(frozen=True, slots=True)
class _End:
    """What the first or the last stage takes beside its layers, of the coefficients that embedding and head go into."""

    a0: float = 0.0
    a1: float = 0.0


def _without_ends(cost: CostModel) -> tuple[CostModel, _End, _End]:
    """The model without embedding and head, and those two.

    The head's weights are read for every microbatch: what the last stage has more of a0 than its layers would at the
    inner stages' rate, or the first one's. The embedding is told from the layers only where there are inner stages.
    head_s stays in place.
    """
    stages = list(cost.stages)
    head = embed = _End()
    inner = stages[1:-1]
    if len(stages) > 1:
        head = _End(a0=_excess(stages[-1], inner or stages[:1], "a0"))
        stages[-1] = replace(stages[-1], a0=stages[-1].a0 - head.a0)
    if inner:
        first = stages[0]
        embed = _End(_excess(first, inner, "a0"), _excess(first, inner, "a1"))
        stages[0] = replace(first, a0=first.a0 - embed.a0, a1=first.a1 - embed.a1)
    return CostModel(cost.tile, tuple(stages)), embed, head


def _excess(stage: StageCost, others: Sequence[StageCost], name: str) -> float:
    """Of a coefficient, what is beyond the rate a layer at which the others have it."""
    rate = sum(getattr(other, name) for other in others) / sum(_num_layers(other) for other in others)
    found: float = max(0.0, getattr(stage, name) - rate * _num_layers(stage))
    return found


def _shares(stages: Sequence[StageCost], first: int, end: int) -> StageCost:
    """The cost of layers [first, end), each taking its share of its stage, without what sampled rows cost."""
    cost = StageCost((first, end), 0.0, 0.0, 0.0, 0.0, 0.0)
    for stage in stages:
        shared = max(0, min(end, stage.layers[1]) - max(first, stage.layers[0]))
        share = shared / (stage.layers[1] - stage.layers[0])
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


def _num_layers(stage: StageCost) -> int:
    return stage.layers[1] - stage.layers[0]
