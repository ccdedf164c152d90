"""The cost model for another split of the layers over the stages.

The cost of the embedding stays on the first stage, and that of the LM head on the last. Layers share the other cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.partition import StageSeconds


def repartition(cost: CostModel, layers: Sequence[tuple[int, int]]) -> CostModel:
    """Return the cost model for another split of the same layers.

    With the same number of stages, each stage keeps its time per layer, because stages differ mostly by their machines.
    With another number of stages, each layer keeps its time.

    Args:
        layers: layers [first, end) of each stage, contiguous over all layers.
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
    """Return a function (stage, first, end) that gives the seconds of a stage with the layers [first, end) for a load.

    The costs are those of `repartition` for a split into `num_stages` stages.
    """
    inner, embed, head = _without_ends(cost, num_stages)
    sampling_s = cost.stages[-1].head_s * load.decodes
    embed_s = embed.a0 + embed.a1 * cost.tiles(load.num_tokens)
    layer_s: list[float] = []  # per layer, one entry per stage
    for index, stage in enumerate(inner.stages):
        # Rounding must not make this negative: a stage with an added layer takes no less.
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


# A stage's time per token can be measured if _TOKENS tokens take more than _FAIR_SHARE of their microbatch's time.
_TOKENS = 256
_FAIR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class _End:
    """The cost of the first or the last stage beyond its layers: the parts of a0 and a1 for embedding or LM head."""

    a0: float = 0.0
    a1: float = 0.0


def _without_ends(cost: CostModel, num_stages: int) -> tuple[CostModel, _End, _End]:
    """Return the model without embedding and LM head, the cost of the embedding, and that of the LM head.

    The LM head's weights are read for every microbatch. So its cost is the part of the last stage's a0 that its layers
    do not explain. Their rate is that of the inner stages, or of the first stage if there are none. It is scaled to the
    last stage's machine by the time per token, in which the LM head has no part.

    The embedding is separated from the layers only if there are inner stages. It is never separated if stages keep
    their time per layer: it is small, and a slow machine looks like a large embedding. head_s is not changed.

    Args:
        num_stages: number of stages of the new split.
    """

    def told(stage: StageCost) -> bool:
        """Return whether the stage's time per token can be measured.

        If time hardly grows with tokens, a fit finds almost nothing, or noise.
        """
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
    """Return the value per layer of a coefficient, such as "a0", over these stages."""
    found: float = sum(getattr(stage, name) for stage in stages) / sum(_count(stage.layers) for stage in stages)
    return found


def _excess(stage: StageCost, rate: float, name: str) -> float:
    """Return the part of a stage's coefficient that exceeds `rate` per layer."""
    found: float = max(0.0, getattr(stage, name) - rate * _count(stage.layers))
    return found


def _sum(span: tuple[int, int], parts: Iterable[tuple[StageCost, int]]) -> StageCost:
    """Return the cost of the layers [first, end) of `span`, without the LM head.

    Args:
        parts: stages, each with the number of layers of the span that cost as much as its own layers.
    """
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
    """Return the number of layers that two spans [first, end) share."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _count(span: tuple[int, int]) -> int:
    return span[1] - span[0]
