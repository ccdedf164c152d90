"""The least time in which a machine can do a piece of work, however it is scheduled.

Every token but each request's last goes through all layers; a row of logits is needed for each output token alone.

    arithmetic_s    those products and the attention's, at the rate of large matrix products
    reading_s       every weight once for each token of the longest output, and the keys and values that decodes attend
                    to, at the rate at which memory is read
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sarathi_pp.core.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds. Layers with a sliding window count as if they saw everything, and experts as if each step read them all:
    for such models it is not quite a floor.
    """

    arithmetic_s: float
    reading_s: float

    @property
    def seconds(self) -> float:
        """Computing and reading can go on at once."""
        return max(self.arithmetic_s, self.reading_s)

    @classmethod
    def of(cls, cost: CostModel, lengths: Iterable[tuple[int, int]]) -> Floor:
        """cost: all layers and the head as one stage, from the machine's own rates, in tiles of one token, without
        launching: what it takes at least is the reading of the weights. lengths: prompt and output tokens of each
        request, neither 0.
        """
        (whole,) = cost.stages
        computed_s = read_s = 0.0
        longest = 0
        for prompt, output in lengths:
            tokens = prompt + output - 1
            computed_s += whole.a1 * tokens + whole.a2 * tokens**2 / 2 + whole.head_s * output
            # Decodes at positions prompt .. tokens - 1 read that many keys and their own.
            read_s += whole.a3 * (tokens * (tokens + 1) - prompt * (prompt + 1)) / 2
            longest = max(longest, output)
        return cls(computed_s, read_s + (whole.a0 + whole.a1 * cost.ridge) * longest)
