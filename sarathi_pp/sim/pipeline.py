"""A simulated pipeline: the times at which a microbatch arrives, starts and ends on each stage.

Every stage computes the microbatches in the order of issue. So the times of a microbatch on a stage follow from the
microbatch before it and from the stage before it, and no event queue is needed. For stage s:

    arrived[s] = max(end[s - 1], when the link had sent the microbatch before) + bytes / bandwidth + latency
    start[s]   = max(end[s] of the microbatch before, arrived[s]) + time of the host
    end[s]     = start[s] + modelled time x noise

Bandwidth and latency are those of the link from stage s - 1 to stage s. If the first stage computes an LM head for the
last one, it does so between two microbatches.
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
    """The speed of one edge, the directed connection from a stage to the next one.

    The bytes of a microbatch occupy the link for bytes / bytes_per_s. They arrive latency_s after that.

    Attributes:
        token_bytes: bytes of one token's activations.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    token_bytes: int = 0


# The links from each stage to the next, and at last the one from the last stage to the first, which carries token ids.
Links = tuple[Link, ...]


def links_of(profile: Profile, num_stages: int) -> Links:
    """Return the links of a pipeline of `num_stages` stages, with the latencies and rates of the profile."""
    token_bytes = profile.hidden_size * _ITEM_BYTES[profile.dtype]
    return tuple(
        Link(edge.latency_s + edge.added_latency_s, edge.bytes_per_s, token_bytes)
        for edge in profile.edge_links(num_stages)
    )


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The times of one microbatch on one stage, in seconds on the virtual clock."""

    arrived_s: float
    start_s: float
    end_s: float


class VirtualPipeline:
    """The stages and links of one pipeline on a virtual clock.

    Args:
        cost: cost model that gives the time of a microbatch on each stage.
        links: one per stage: the link to the next stage, and for the last stage the link to the first.
        noise: gives a random factor for each modelled time; None for no noise.
        head_factor: time of an LM head on the first stage, relative to the time on the last stage.
        host_s: seconds from the time when a stage could start a microbatch until it computes it.
    """

    def __init__(
        self, cost: CostModel, links: Links, noise: Noise | None = None, head_factor: float = 1.0, host_s: float = 0.0
    ) -> None:
        if len(links) != len(cost.stages):
            raise ValueError(f"{len(links)} links for {len(cost.stages)} stages; give one link per stage")
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
        """Time at which the first stage is free, in seconds."""
        return self._free_s[0]

    def run(self, microbatch: MicroBatch) -> tuple[list[StageSpan], float]:
        """Run a microbatch that is issued at `microbatch.issued_s`.

        Returns:
            Its times on each stage, and the time at which its result is back on the first stage. If the first stage
            computes the LM head, it is the time at which the rows for it are there.
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
        """Compute the LM head of a microbatch on the first stage. Return its start and its end, in seconds.

        It starts at `at_s`, or as soon as the stage is free.
        """
        start_s = max(at_s, self._free_s[0])
        seconds = self._cost.head_seconds(Load.of(microbatch)) * self._head_factor
        if self._noise is not None:
            seconds *= self._noise.factor(0, start_s)
        self._free_s[0] = start_s + seconds
        return start_s, start_s + seconds
