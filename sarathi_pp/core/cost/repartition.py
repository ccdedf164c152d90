"""The cost model for another split of the layers over the stages.

The cost of the embedding stays on the first stage, and that of the LM head on the last. Layers share the other cost: in
equal parts if they are alike, and otherwise in the proportion of their own costs (CostModel.layer_costs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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
        stages = [_sum(inner, span, [(stage, span)]) for span, stage in zip(layers, inner.stages, strict=True)]
    else:
        shared = ([(stage, _overlap(span, stage.layers)) for stage in inner.stages] for span in layers)
        stages = [_sum(inner, span, parts) for span, parts in zip(layers, shared, strict=True)]
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
    timed = [_LayerTimes.of(inner, index, load) for index in range(len(inner.stages))]
    num_layers = cost.stages[-1].layers[1]

    def seconds(stage: int, first: int, end: int) -> float:
        if num_stages == len(timed):
            layers_s = timed[stage].seconds((first, end))
        else:
            parts = zip(inner.stages, timed, strict=True)
            layers_s = sum(times.seconds(_overlap((first, end), own.layers)) for own, times in parts)
        return layers_s + embed_s * (first == 0) + (head.a0 + sampling_s) * (end == num_layers)

    return seconds


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """The times of all layers of the model on one stage's machine.

    Attributes:
        mean_s: mean seconds of the stage's own layers.
        before: for each layer, the time of all earlier layers in units of mean_s. The last entry is that of all layers.
    """

    mean_s: float
    before: tuple[float, ...]

    @classmethod
    def of(cls, cost: CostModel, index: int, load: Load) -> _LayerTimes:
        """Return the times for a load.

        Args:
            cost: the model without embedding and LM head.
            index: index of the stage.
        """
        stage, num_layers = cost.stages[index], cost.stages[-1].layers[1]
        # Rounding must not make this negative: a stage with an added layer takes no less.
        mean_s = max(0.0, cost.seconds(index, load) - stage.head_s * load.decodes) / _count(stage.layers)
        if not cost.layer_costs or mean_s == 0:
            return cls(mean_s, tuple(map(float, range(num_layers + 1))))
        row = cost.row(load)
        alone = (_sum(cost, (layer, layer + 1), [(stage, (layer, layer + 1))]) for layer in range(num_layers))
        return cls(mean_s, tuple(accumulate((layer.seconds(row) / mean_s for layer in alone), initial=0.0)))

    def seconds(self, span: tuple[int, int]) -> float:
        """Return the seconds of the layers [first, end)."""
        return self.mean_s * (self.before[span[1]] - self.before[span[0]])


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
        measured = all(map(told, [stages[-1], *others]))
        slower = _rate(cost, stages[-1:], "a1") / _rate(cost, others, "a1") if measured else 1.0
        head = _End(a0=_excess(cost, stages[-1], slower * _rate(cost, others, "a0"), "a0"))
        stages[-1] = replace(stages[-1], a0=stages[-1].a0 - head.a0)
    if inner and num_stages != len(stages):
        first = stages[0]
        embed = _End(*(_excess(cost, first, _rate(cost, inner, name), name) for name in ("a0", "a1")))
        stages[0] = replace(first, a0=first.a0 - embed.a0, a1=first.a1 - embed.a1)
    return replace(cost, stages=tuple(stages)), embed, head


def _weight(cost: CostModel, span: tuple[int, int], name: str) -> float:
    """Return how much of a coefficient, such as "a0", these layers have. The unit is the same for all layers."""
    if not cost.layer_costs:
        return _count(span)
    found: float = sum(getattr(layer, name) for layer in cost.layer_costs[slice(*span)])
    return found


def _rate(cost: CostModel, stages: Sequence[StageCost], name: str) -> float:
    """Return a coefficient per unit of `_weight`, over these stages. It is 0 if their layers have no part in it."""
    weight = sum(_weight(cost, stage.layers, name) for stage in stages)
    found: float = sum(getattr(stage, name) for stage in stages) / weight if weight > 0 else 0.0
    return found


def _excess(cost: CostModel, stage: StageCost, rate: float, name: str) -> float:
    """Return the part of a stage's coefficient that exceeds `rate` per unit of its layers' weight."""
    found: float = max(0.0, getattr(stage, name) - rate * _weight(cost, stage.layers, name))
    return found


_COEFFICIENTS = ("a0", "a1", "a2", "a3", "a4")


def _sum(cost: CostModel, span: tuple[int, int], parts: Iterable[tuple[StageCost, tuple[int, int]]]) -> StageCost:
    """Return the cost of the layers [first, end) of `span`, without the LM head.

    Args:
        parts: stages, each with the layers of the span that run as fast as its own layers.
    """
    sums, page_bytes = dict.fromkeys(_COEFFICIENTS, 0.0), 0
    for stage, layers in parts:
        for name in _COEFFICIENTS:
            sums[name] += _part(cost, stage, layers, name)
        page_bytes += round(_part(cost, stage, layers, "page_bytes"))
    return StageCost(span, **sums, page_bytes=page_bytes)


def _part(cost: CostModel, stage: StageCost, layers: tuple[int, int], name: str) -> float:
    """Return the value of a coefficient for these layers, if they run as fast as those of the stage.

    A stage without attention tells nothing about the time of attention. It then has the mean rate of all stages.
    """
    weight, own = _weight(cost, layers, name), _weight(cost, stage.layers, name)
    found: float = weight / own * getattr(stage, name) if own > 0 else weight * _rate(cost, cost.stages, name)
    return found


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the layers [first, end) that two spans share. If they share none, first is end."""
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def _count(span: tuple[int, int]) -> int:
    return span[1] - span[0]
