"""A pipeline in arithmetic: stages that take their modelled time, links between them, one virtual clock.

Stages are first in, first out, and microbatches run in the order of issue. So every time follows from the microbatch
before and the stage before, and no event queue is needed:

    arrived[s] = max(end[s - 1], when the microbatch before has left the link) + tokens / bandwidth + latency,
                 each of the edge from s - 1 to s
    start[s]   = max(end[s] of the microbatch before, arrived[s]) + time of the host
    end[s]     = start[s] + modelled time x noise

If the first stage computes an LM head for the last one, it uses its own time between two microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.sim.noise import Noise

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one edge.

    Attributes:
        token_bytes: bytes of one token's activations. They occupy the link as its rate requires, and arrive the latency
            later.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    token_bytes: int = 0


# One per edge: from each stage to the next, and from the last to the first, which carries tokens alone.
Links = tuple[Link, ...]


def links_of(profile: Profile, num_stages: int) -> Links:
    token_bytes = profile.hidden_size * _ITEM_BYTES[profile.dtype]
    return tuple(
        Link(edge.latency_s + edge.added_latency_s, edge.bytes_per_s, token_bytes)
        for edge in profile.edge_links(num_stages)
    )


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One microbatch on one stage, in seconds of virtual time."""

    arrived_s: float
    start_s: float
    end_s: float


class VirtualPipeline:
    """The stages and links of one pipeline on a virtual clock.

    Args:
        links: see Links.
        noise: gives factors for every modelled time; None for no noise.
        head_factor: time of an LM head on the first stage, relative to that on the last.
        host_s: see Profile.
    """

    def __init__(
        self, cost: CostModel, links: Links, noise: Noise | None = None, head_factor: float = 1.0, host_s: float = 0.0
    ) -> None:
        if len(links) != len(cost.stages):
            raise ValueError(f"{len(cost.stages)} stages have as many edges, not {len(links)}")
        self._cost = cost
        self._head_factor = head_factor
        self._host_s = host_s
        self._bare = (*cost.stages[:-1], cost.stages[-1].without_head())
        self._links = links
        self._noise = None if noise is None or noise.quiet else noise
        self._free_s = [0.0] * len(cost.stages)
        self._link_free_s = [0.0] * len(cost.stages)  # from each stage to the next

    @property
    def entry_free_s(self) -> float:
        """Time when the first stage can take the next microbatch."""
        return self._free_s[0]

    def run(self, microbatch: MicroBatch) -> tuple[list[StageSpan], float]:
        """Run a microbatch that is issued at `microbatch.issued_s`.

        Returns:
            Its spans, and the time when its result is back, or the input of its LM head.
        """
        load = Load.of(microbatch)
        row = self._cost.row(load)
        num_tokens, link_free_s, host_s = load.num_tokens, self._link_free_s, self._host_s
        spans = []
        arrived_s = microbatch.issued_s
        costs = self._bare if microbatch.head_on_first else self._cost.stages
        stages = zip(costs, self._free_s, self._links, strict=True)
        for stage, (cost, free_s, link) in enumerate(stages):
            # Without max(), because a call of it here takes a tenth of the simulation's speed.
            start_s = (free_s if free_s > arrived_s else arrived_s) + host_s
            seconds = cost.seconds(row)
            if self._noise is not None:
                seconds *= self._noise.factor(stage, start_s)
            end_s = start_s + seconds
            spans.append(StageSpan(arrived_s, start_s, end_s))
            self._free_s[stage] = end_s
            busy_s = num_tokens * link.token_bytes / link.bytes_per_s
            sent_s = end_s if end_s > link_free_s[stage] else link_free_s[stage]
            link_free_s[stage] = sent_s + busy_s
            arrived_s = sent_s + (link.latency_s + busy_s)
        return spans, end_s + self._links[-1].latency_s

    def run_head(self, microbatch: MicroBatch, at_s: float) -> tuple[float, float]:
        """Compute an LM head on the first stage, as soon as that is free from `at_s` on. Return its start and end."""
        start_s = max(at_s, self._free_s[0])
        seconds = self._cost.head_seconds(Load.of(microbatch)) * self._head_factor
        if self._noise is not None:
            seconds *= self._noise.factor(0, start_s)
        self._free_s[0] = start_s + seconds
        return start_s, start_s + seconds
