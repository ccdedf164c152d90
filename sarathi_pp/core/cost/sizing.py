"""Numbers that follow from the cost of stages: tokens of a microbatch, and microbatches in flight."""

from __future__ import annotations

from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import PolicySpec

# A stage is saturated at this share of the best tokens per second. (SARATHI, arXiv 2308.16369, section 3.1, reads it
# off such a curve.)
_SATURATED = 0.9
# Larger microbatches are not considered: the wait for one grows with its size, and throughput does not.
MOST_TOKENS = 2048
# With a jitter above this, a stage waits for its neighbours often enough that one more microbatch in flight pays. With
# this few stages it does not pay: the decodes are then divided among relatively many more microbatches.
_JITTERY = 0.03
_FEW_STAGES = 2
# Content of a microbatch if no workload is known: 10 prompt tokens per decode, as in SARATHI's section 5.3.
_PROMPT_TO_OUTPUT = 10
_CONTEXT = 1024


def tokens_per_s(cost: CostModel, num_tokens: int) -> float:
    """Return the prompt tokens per second on the slowest stage, without their attention.

    Attention is left out because it is the same for a prompt, however it is cut.
    """
    load = Load(num_tokens, 0.0, 0, 0)
    slowest_s = max(cost.seconds(stage, load) for stage in range(len(cost.stages)))
    return num_tokens / slowest_s if slowest_s > 0 else 0.0


def saturation(cost: CostModel) -> int:
    """Return the fewest tokens of a microbatch, in whole tiles, that give 90 % of the best tokens per second."""
    sizes = range(cost.tile, max(MOST_TOKENS, cost.tile) + 1, cost.tile)
    rates = [tokens_per_s(cost, size) for size in sizes]
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= _SATURATED * max(rates))


def whole_tiles(cost: CostModel, num_tokens: float) -> tuple[int, int]:
    """Return the multiples of the tile below and above a number of tokens. Each is at least one tile."""
    below = max(1, int(num_tokens // cost.tile)) * cost.tile
    return below, below + cost.tile if below < num_tokens else below


def inflight(profile: Profile, policy: PolicySpec, num_stages: int) -> int:
    """Return the most microbatches in flight for a run of this policy on the profile's stages."""
    jittery = profile.jitter_cv > _JITTERY and num_stages > _FEW_STAGES
    return max(policy.inflight(num_stages), num_stages + jittery)


def typical_load(chunk_size: int) -> Load:
    """Return the load of a full microbatch in the middle of a run about which nothing is known."""
    decodes = chunk_size // (_PROMPT_TO_OUTPUT + 1)
    prefill = chunk_size - decodes
    return Load(prefill, prefill * _CONTEXT / 2, decodes, decodes * _CONTEXT)
