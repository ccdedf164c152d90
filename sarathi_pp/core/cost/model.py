"""The cost of a microbatch on each stage: a formula with few coefficients.

    t = a0  +  a1 * tiles(n)  +  a2 * sum(x*L + x*x/2)  +  a3 * sum(KV)  +  (a4 + head) * decodes
        fixed  linear layers     attention of chunks       attention of      per decode
                                                           decodes

    n      tokens in the microbatch; tiles(n) = ceil(max(n, ridge) / tile)
    x, L   a chunk of x tokens after L earlier ones
    KV     tokens whose keys and values a decode reads
    head   the LM head, on the last stage only

All times are in seconds. The form follows SARATHI's own account of the time (arXiv 2308.16369, sections 3 and 4.4):
linear layers compute whole tiles of tokens, and attention grows with the context. The ridge is the ridge point of the
roofline model (Williams, Waterman, Patterson, CACM 2009): fewer tokens than that take as long as `ridge` tokens,
because reading the weights takes that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.layer_shape import keeps_state


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers on which a microbatch's time depends.

    Attributes:
        prefill_attention: query-key scores of the prefill chunks, sum(x*L + x*x/2).
        decode_context: tokens whose keys and values the decodes read, added up.
    """

    prefill_tokens: int
    prefill_attention: float
    decodes: int
    decode_context: int

    @classmethod
    def of(cls, microbatch: MicroBatch) -> Load:
        """Return the load of a microbatch."""
        # One pass: the coordinator does this for every microbatch.
        prefill_tokens = decodes = decode_context = 0
        prefill_attention = 0.0
        for chunk in microbatch.chunks:
            _, _, start, num_tokens, decode, *_ = chunk
            if decode:
                decodes += 1
                decode_context += start + num_tokens
            else:
                prefill_tokens += num_tokens
                prefill_attention += chunk.attention
        return cls(prefill_tokens, prefill_attention, decodes, decode_context)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes


# The factors of the coefficients a0 .. a4 for one microbatch.
Row = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """One microbatch's seconds on one stage, by cause. They add up to its time.

    Attributes:
        fixed: the time that every microbatch takes.
        prefill: linear layers over all tokens, and attention of chunks.
        context: attention of decodes.
        decode: cost of each decode, whatever its context.
    """

    fixed: float
    prefill: float
    context: float
    decode: float

    @property
    def total(self) -> float:
        return self.fixed + self.prefill + self.context + self.decode


@dataclass(frozen=True, slots=True)
class StageCost:
    """The coefficients of the formula for one stage, in seconds.

    Attributes:
        layers: the stage's layers [first, end).
        head_s: time of the LM head per decode; 0 except on the last stage.
        page_bytes: bytes of one KV page over all layers of the stage; 0 if unknown.
    """

    layers: tuple[int, int]
    a0: float
    a1: float
    a2: float
    a3: float
    a4: float
    head_s: float = 0.0
    page_bytes: int = 0

    def seconds(self, row: Row) -> float:
        """Return the seconds of a microbatch with the factors that CostModel.row gives."""
        fixed, tiles, attention, context, decodes = row
        linear = self.a0 * fixed + self.a1 * tiles + self.a2 * attention
        return linear + self.a3 * context + (self.a4 + self.head_s) * decodes

    def without_head(self) -> StageCost:
        """Return the last stage's cost if another stage computes the LM head."""
        return replace(self, head_s=0.0)

    def scaled(self, factor: float) -> StageCost:
        """Return the stage's cost if everything on it takes `factor` times as long."""
        names = ("a0", "a1", "a2", "a3", "a4", "head_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The coefficients of one layer relative to those of the other layers of its model. Only their ratios count.

    Attributes:
        kind: kind of the layer, for the user.
    """

    kind: str
    a0: float
    a1: float
    a2: float
    a3: float
    a4: float
    page_bytes: int

    @property
    def keeps_state(self) -> bool:
        """Return whether the layer keeps a state per sequence, instead of KV pages."""
        return keeps_state(self.kind)

    @classmethod
    def of(cls, kind: str, stage: StageCost) -> LayerCost:
        """Return the coefficients of a stage that has this layer alone."""
        return cls(kind, stage.a0, stage.a1, stage.a2, stage.a3, stage.a4, stage.page_bytes)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a microbatch on each stage of a pipeline.

    Attributes:
        tile: number of tokens that linear layers compute in one step.
        stages: the coefficients of each stage, first stage first.
        ridge: on every stage, fewer tokens take as long as this number of tokens. 0 means no ridge.
        layer_costs: how the layers of a stage divide its time among them. Empty if all layers are alike and keep
            no state.
    """

    tile: int
    stages: tuple[StageCost, ...]
    ridge: int = 0
    layer_costs: tuple[LayerCost, ...] = ()

    @property
    def keeps_states(self) -> bool:
        """Return whether some layers keep a state per sequence, so that sequences cannot share KV pages."""
        return any(layer.keeps_state for layer in self.layer_costs)

    def tiles(self, num_tokens: int) -> int:
        """Return the number of tiles that linear layers compute for a microbatch of `num_tokens` tokens."""
        return math.ceil(max(num_tokens, self.ridge) / self.tile)

    def terms(self, stage: int, load: Load) -> Terms:
        """Return the parts of a microbatch's time on the stage with this index."""
        cost = self.stages[stage]
        return Terms(
            fixed=cost.a0,
            prefill=cost.a1 * self.tiles(load.num_tokens) + cost.a2 * load.prefill_attention,
            context=cost.a3 * load.decode_context,
            decode=(cost.a4 + cost.head_s) * load.decodes,
        )

    def row(self, load: Load) -> Row:
        """Return the factors of the coefficients a0 .. a4. They are the same for all stages."""
        tiles = self.tiles(load.num_tokens)
        return 1.0, float(tiles), load.prefill_attention, float(load.decode_context), float(load.decodes)

    def seconds(self, stage: int, load: Load) -> float:
        return self.stages[stage].seconds(self.row(load))

    def prefix_seconds(self, num_tokens: int) -> float:
        """Return the seconds of the first tokens of a prompt, summed over the stages, in microbatches with others.

        They do not contain the fixed time of microbatches, nor that of tiles which are not full.
        """
        tiles, attention = num_tokens / self.tile, num_tokens**2 / 2
        return sum(stage.a1 * tiles + stage.a2 * attention for stage in self.stages)

    def head_seconds(self, load: Load) -> float:
        """Return the seconds of a microbatch's LM head alone, whichever stage computes it."""
        return self.stages[-1].head_s * load.decodes
