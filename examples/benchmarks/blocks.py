"""Blocks of one run in which some work is on or off, to measure the cost of that work.

On shared machines, separate runs of the same work differ by 10 % and more. Blocks of three seconds within one run see
the same machine. In each four blocks the work is on in the first and the last, so that a growth over the run cancels
out. Neighbouring blocks still differ by several per cent. So cheap work is repeated, and the difference is divided by
the number of repeats.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from sarathi_pp.trace.latency import percentile

BLOCK_S = 3.0
# Seconds that are left out at the start of a block, because work from before the block ends there.
SETTLE_S = 1.0
RESAMPLES = 10_000
CONFIDENCE = "95 % confidence, bootstrap"


def block_of(at_s: float) -> int:
    """Return the block of a time. It is the same on every rank, because all ranks share the host's clock."""
    return int(at_s / BLOCK_S)


def is_on(block: int) -> bool:
    return block % 4 in (0, 3)


def interval_of_blocks(results_s: list[float]) -> dict[int, float]:
    """Return, for each block that is wholly in the run, the mean seconds between its results."""
    blocks: dict[int, list[float]] = {}
    for at_s in results_s:
        if at_s % BLOCK_S >= SETTLE_S:
            blocks.setdefault(block_of(at_s), []).append(at_s)
    whole = range(block_of(results_s[0]) + 1, block_of(results_s[-1]))
    return {block: (blocks[block][-1] - blocks[block][0]) / (len(blocks[block]) - 1) for block in whole}


def ratios(intervals: dict[int, float]) -> Iterator[float]:
    """Yield the ratio of on to off for each pair of neighbouring blocks that differ."""
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
    """Return the cost of the work done once, as a share of the run.

    Args:
        figures: spread of the ratios.
        times: how often the run repeated the work.
    """

    def one(ratio: float) -> float:
        return (ratio - 1) / times

    return {"median": one(figures["median"]), CONFIDENCE: [one(bound) for bound in figures[CONFIDENCE]]}
