"""Sizes that follow from what stages cost: microbatch, layer split, microbatches in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.cost import CostModel, Load, StageCost
from sarathi_pp.core.policy import auto_inflight
from sarathi_pp.core.profile import Profile

# Saturated: this share of the best tokens a second (SARATHI, arXiv 2308.16369, section 3.1, reads it off such a curve).
_SATURATED = 0.9
# Microbatches beyond this are not considered: the wait for one grows with it, and throughput no more.
MOST_TOKENS = 2048
# Jitter above which a stage waits for its neighbours often enough that one microbatch more in flight pays; of few
# stages it does not, since decodes are cut into that many more cohorts.
_JITTERY = 0.03
_FEW_STAGES = 2
# What a microbatch holds where no workload is known: 10 prompt tokens for each decode, as in SARATHI's section 5.3.
_PROMPT_TO_OUTPUT = 10
_CONTEXT = 1024


def tokens_per_s(cost: CostModel, num_tokens: int) -> float:
    """Of prompt tokens alone, on the slowest stage, without their attention.

    Attention is left out because it is the same for a prompt however it is cut.
    """
    load = Load(num_tokens, 0.0, 0, 0)
    slowest_s = max(cost.seconds(stage, load) for stage in range(len(cost.stages)))
    return num_tokens / slowest_s if slowest_s > 0 else 0.0


def saturation(cost: CostModel) -> int:
    """The fewest tokens, in whole tiles, within 10 % of the best throughput of a microbatch."""
    sizes = range(cost.tile, max(MOST_TOKENS, cost.tile) + 1, cost.tile)
    rates = [tokens_per_s(cost, size) for size in sizes]
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= _SATURATED * max(rates))


def whole_tiles(cost: CostModel, num_tokens: float) -> tuple[int, int]:
    """The multiples of the tile around a number of tokens, at least one tile."""
    below = max(1, int(num_tokens // cost.tile)) * cost.tile
    return below, below + cost.tile if below < num_tokens else below


def inflight(profile: Profile, policy: str, num_stages: int) -> int:
    """Microbatches at once. policy: as `make_policy` takes it."""
    jittery = profile.jitter_cv > _JITTERY and num_stages > _FEW_STAGES
    return max(auto_inflight(policy, num_stages), num_stages + jittery)


def typical_load(chunk_size: int) -> Load:
    """A full microbatch in the middle of a run of which nothing is known."""
    decodes = chunk_size // (_PROMPT_TO_OUTPUT + 1)
    prefill = chunk_size - decodes
    return Load(prefill, prefill * _CONTEXT / 2, decodes, decodes * _CONTEXT)


def recut(cost: CostModel, layers: Sequence[tuple[int, int]]) -> CostModel:
    """The same model cut into other stages: embedding and head stay at the ends, layers take their share of the rest.

    layers: [first, end) of each stage, contiguous over the same layers.
    """
    inner, embed, head = _without_ends(cost)
    *others, last = inner.split(layers).stages
    stages = [*others, replace(last, a0=last.a0 + head.a0)]
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


def _num_layers(stage: StageCost) -> int:
    return stage.layers[1] - stage.layers[0]
