"""The cost of a microbatch on each stage: a formula with few coefficients.

    t = a0  +  a1 * tiles(n)  +  a2 * sum(x*L + x*x/2)  +  a3 * sum(KV)  +  (a4 + head) * decodes
        fixed  linear layers     attention of chunks       attention of      per row
                                                           decodes

    n      tokens in the microbatch; tiles(n) = ceil(max(n, ridge) / tile)
    x, L   a chunk of x tokens after L earlier ones
    KV     tokens that a decode reads

All times are in seconds. The form follows SARATHI's own account of the time (arXiv 2308.16369, sections 3 and 4.4):
linear layers take whole tiles, and attention grows with the context. The ridge point is that of the roofline model
(Williams, Waterman, Patterson, CACM 2009): fewer tokens wait for the weights as long as that many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sarathi_pp.core.plan import MicroBatch


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers on which a microbatch's time depends.

    Attributes:
        prefill_attention: score entries of the prefill chunks, summed.
        decode_context: KV tokens that the decodes read.
    """

    prefill_tokens: int
    prefill_attention: float
    decodes: int
    decode_context: int

    @classmethod
    def of(cls, microbatch: MicroBatch) -> Load:
        # One pass: the coordinator does this for every microbatch.
        prefill_tokens = decodes = decode_context = 0
        prefill_attention = 0.0
        for chunk in microbatch.chunks:
            _, _, start, num_tokens, decode, _, _, _ = chunk
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


# The factors of the coefficients a0 .. a4.
Row = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """One microbatch's seconds on one stage, by cause. They add up to its time.

    Attributes:
        fixed: every microbatch pays it.
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
    """The coefficients of one stage.

    Attributes:
        layers: [first, end).
        head_s: seconds per sampled row, on the last stage.
        page_bytes: size of one KV page over the stage's layers, 0 if unknown.
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
        """Return the seconds of a microbatch with the factors `row`. See CostModel.row."""
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
class CostModel:
    """The stages of one pipeline, first to last.

    Attributes:
        tile: tokens that linear layers take at once.
        ridge: on every stage, fewer tokens take as long as this many.
    """

    tile: int
    stages: tuple[StageCost, ...]
    ridge: int = 0

    def tiles(self, num_tokens: int) -> int:
        return math.ceil(max(num_tokens, self.ridge) / self.tile)

    def terms(self, stage: int, load: Load) -> Terms:
        cost = self.stages[stage]
        return Terms(
            fixed=cost.a0,
            prefill=cost.a1 * self.tiles(load.num_tokens) + cost.a2 * load.prefill_attention,
            context=cost.a3 * load.decode_context,
            decode=(cost.a4 + cost.head_s) * load.decodes,
        )

    def row(self, load: Load) -> Row:
        """Return the factors of a stage's coefficients."""
        tiles = self.tiles(load.num_tokens)
        return 1.0, float(tiles), load.prefill_attention, float(load.decode_context), float(load.decodes)

    def seconds(self, stage: int, load: Load) -> float:
        return self.stages[stage].seconds(self.row(load))

    def head_seconds(self, load: Load) -> float:
        """Return the seconds of a microbatch's LM head alone, whichever stage computes it."""
        return self.stages[-1].head_s * load.decodes
