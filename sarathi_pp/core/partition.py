"""Which layers each stage owns, as a pure function of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sarathi_pp.errors import PartitionError


def partition(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """One [first, end) per stage, contiguous over [0, num_layers).

    Without a split the layers are shared out evenly; where that leaves a remainder the earlier stages take
    it, since the last one also has the head. Raises PartitionError with the numbers and what would fit.
    """
    if num_stages > num_layers:
        raise PartitionError(
            f"{num_stages} stages are more than the model's {num_layers} layers: a stage would own no layer."
            f"\n  given  --stages {num_stages}        try  --stages {num_layers} or fewer"
        )
    if split is None:
        share, extra = divmod(num_layers, num_stages)
        split = [share + (stage < extra) for stage in range(num_stages)]
    given = ",".join(map(str, split))
    if len(split) != num_stages:
        raise PartitionError(
            f"--layer-split {given} names {len(split)} stages, and the run has {num_stages}."
            f"\n  try  --stages {len(split)}, or {num_stages} numbers that add up to {num_layers}"
        )
    if sum(split) != num_layers or min(split) < 1:
        raise PartitionError(
            f"--layer-split {given} adds up to {sum(split)} layers with a smallest share of {min(split)}; the "
            f"model has {num_layers}, and each stage needs at least 1."
        )
    return tuple(pairwise([0, *accumulate(split)]))
