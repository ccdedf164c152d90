"""The least time in which a machine can do a piece of work, however it is scheduled.

All tokens except the last one of each request go through all layers. Only output tokens need a row of logits. Prompts
that begin with the same tokens need these only once, as with a prefix cache.

    arithmetic_s    products of the layers, the LM head and attention, at the rate of large matrix products
    reading_s       reads at the rate of reading memory: each weight once per token of the longest output, and the keys
                    and values that decodes attend to
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

from sarathi_pp.core.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds of arithmetic and of reading memory.

    Layers with a sliding window count as if they attended to all earlier tokens. Experts count as if each step read all
    of them. So for such models the true floor may be lower.
    """

    arithmetic_s: float
    reading_s: float

    @property
    def seconds(self) -> float:
        """The larger of both: the machine can compute and read at the same time."""
        return max(self.arithmetic_s, self.reading_s)

    @classmethod
    def of(cls, cost: CostModel, lengths: Iterable[tuple[int, int]], shared: Iterable[int] | None = None) -> Floor:
        """Return the floor of some requests.

        Args:
            cost: cost model with all layers and the LM head as one stage, from the measured rates of the machine. Its
                tiles have one token, and launching costs nothing. So its fixed cost is that of reading the weights.
            lengths: prompt and output length per request, in tokens, each at least 1.
            shared: the first tokens per request that are computed for another one. None: no request shares tokens.
        """
        (whole,) = cost.stages
        computed_s = read_s = 0.0
        longest = 0
        for (prompt, output), cached in zip(lengths, repeat(0) if shared is None else shared, strict=False):
            tokens = prompt + output - 1
            computed_s += whole.a1 * (tokens - cached) + whole.a2 * (tokens**2 - cached**2) / 2 + whole.head_s * output
            # Decodes at positions prompt .. tokens - 1 read that many keys and their own.
            read_s += whole.a3 * (tokens * (tokens + 1) - prompt * (prompt + 1)) / 2
            longest = max(longest, output)
        return cls(computed_s, read_s + (whole.a0 + whole.a1 * cost.ridge) * longest)


def shared_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each prompt, the number of first tokens that are computed for another prompt already.

    All prompts together then compute each distinct beginning once. Each prompt computes at least its last token.
    """
    # In sorted order, no earlier prompt has more first tokens in common with a prompt than the one just before it.
    order = sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))
    shared = [0] * len(prompts)
    for before, index in pairwise(order):
        shared[index] = min(_common(prompts[before], prompts[index]), len(prompts[index]) - 1)
    return shared


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
