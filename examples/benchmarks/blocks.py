"""One run in which something is done for some seconds and left out for the next: what it costs, on one machine.

Separate runs of the same work differ by 10 % and more on shared machines; blocks of three seconds within one run see
the same machine. Of each four blocks it is on in the first and the last, so that what grows over the run cancels out.
Even so neighbouring blocks differ by several per cent: what costs little is done many times over, and a part counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from sarathi_pp.trace.latency import percentile

BLOCK_S = 3.0
# Left out at the beginning of a block: what was begun before it ends there.
SETTLE_S = 1.0
RESAMPLES = 10_000
CONFIDENCE = "95 % confidence, bootstrap"


def block_of(at_s: float) -> int:
    """The same on every rank: they share the host's clock."""
    return int(at_s / BLOCK_S)


def is_on(block: int) -> bool:
    return block % 4 in (0, 3)


def interval_of_blocks(results_s: list[float]) -> dict[int, float]:
    """Mean seconds between results of each block that lies wholly in the run."""
    blocks: dict[int, list[float]] = {}
    for at_s in results_s:
        if at_s % BLOCK_S >= SETTLE_S:
            blocks.setdefault(block_of(at_s), []).append(at_s)
    whole = range(block_of(results_s[0]) + 1, block_of(results_s[-1]))
    return {block: (blocks[block][-1] - blocks[block][0]) / (len(blocks[block]) - 1) for block in whole}


def ratios(intervals: dict[int, float]) -> Iterator[float]:
    """On against off, of each two neighbouring blocks of which one was."""
    for before, after in pairwise(intervals):
        if is_on(before) != is_on(after):
            on, off = (before, after) if is_on(before) else (after, before)
            yield intervals[on] / intervals[off]


def spread(found: list[float]) -> dict[str, Any]:
    pairs = sorted(found)
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return {
        "pairs": len(pairs),
        "median": statistics.median(pairs),
        CONFIDENCE: [percentile(medians, share) for share in (2.5, 97.5)],
        "quartiles": [percentile(pairs, share) for share in (25, 75)],
        "min": pairs[0],
        "max": pairs[-1],
    }


def of_one(figures: dict[str, Any], times: int) -> dict[str, Any]:
    """What doing it once costs, by a run in which it was done so many times: shares of the run."""

    def one(ratio: float) -> float:
        return (ratio - 1) / times

    return {"median": one(figures["median"]), CONFIDENCE: [one(bound) for bound in figures[CONFIDENCE]]}
