"""How long a workload takes on a pipeline, from averages alone: no schedule, no simulation."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost import Load, Profile
from sarathi_pp.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload as far as a prediction asks.

    prompt_tokens, decodes: in all; the first token of an output comes with its prompt and is no decode.
    pair_tokens: sum of x*x/2 over the prompts. key_tokens: sum over the decodes of the tokens that each reads.
    least_s: when the last request arrives, on average.
    """

    num_requests: int
    prompt_tokens: int
    decodes: int
    pair_tokens: float
    key_tokens: float
    least_s: float = 0.0

    @classmethod
    def of(cls, workload: Workload) -> Demand:
        prompt_tokens = decodes = 0
        pair_tokens = key_tokens = 0.0
        for prompt, output in workload.lengths():
            prompt_tokens += prompt
            decodes += output - 1
            pair_tokens += prompt * prompt / 2
            key_tokens += (output - 1) * (prompt + output / 2)
        least_s = workload.num_requests / workload.rate
        return cls(workload.num_requests, prompt_tokens, decodes, pair_tokens, key_tokens, least_s)

    def decodes_at_once(self, run: ResolvedRun) -> float:
        """Decodes a microbatch while as many requests run as there are, as may, and as fit the KV cache."""
        fitting = run.num_pages * run.page_size / self.mean_tokens
        return max(1.0, min(run.max_num_seqs, self.num_requests, fitting) / run.num_stages)

    @property
    def mean_tokens(self) -> float:
        """KV tokens of a request, half of its output counted, since outputs grow."""
        return (self.prompt_tokens + self.decodes / 2) / self.num_requests

    def load(self, prefill: float, decodes: float) -> Load:
        """A microbatch of so many tokens of average depth."""
        attention = self.pair_tokens / self.prompt_tokens * prefill
        context = self.key_tokens / self.decodes * decodes if self.decodes else 0.0
        return Load(round(prefill), attention, round(decodes), round(context))


@dataclass(frozen=True, slots=True)
class Prediction:
    wall_s: float
    bubble_ratio: float
    microbatches: int
    total_tokens_per_s: float


def predict(profile: Profile, demand: Demand, run: ResolvedRun) -> Prediction:
    """How long a workload takes on the profile's stages: two kinds of microbatch, each of average content.

        mixed    C tokens, of them b decodes; m1 = prompt tokens / (C - b) of them, until the prompts are in
        tail     decodes alone, as many as run, for what is left of the outputs

    One follows another after the slowest stage's time, or after a passage through all stages divided by those in
    flight, whichever is longer; at the end the last one passes the other stages. Jitter, and microbatches that differ
    from the average, are left out, so that the bubble is a lower bound: a close one about the chunk size that `plan`
    recommends, and no guide far above it, where microbatches full of prompts take turns with decodes alone.
    """
    work = demand.prompt_tokens + demand.decodes
    most = min(demand.decodes_at_once(run), float(run.chunk_size))
    riding = min(most, run.chunk_size * demand.decodes / work, run.chunk_size - 1.0)
    prefill = min(run.chunk_size - riding, float(demand.prompt_tokens))
    num_mixed = demand.prompt_tokens / prefill
    left = max(0.0, demand.decodes - num_mixed * riding)
    kinds = [(num_mixed, demand.load(prefill, riding)), (left / most, demand.load(0.0, most))]
    wall_s = compute_s = passage_s = slowest_s = 0.0
    for count, load in kinds:
        if not count:
            continue
        times = [profile.cost.seconds(stage, load) for stage in range(run.num_stages)]
        slowest_s = max(times)
        passage_s = sum(times) + (run.num_stages - 1) * _transfer_s(profile, load)
        wall_s += count * max(slowest_s, passage_s / run.inflight)
        compute_s += count * sum(times) / run.num_stages
    wall_s = max(wall_s + passage_s - slowest_s, demand.least_s)
    tokens = work + demand.num_requests
    return Prediction(wall_s, 1 - compute_s / wall_s, round(num_mixed + left / most), tokens / wall_s)


def _transfer_s(profile: Profile, load: Load) -> float:
    item_bytes = 4 if profile.dtype == "float32" else 2
    return profile.link_latency_s + load.num_tokens * profile.hidden_size * item_bytes / profile.link_bytes_per_s
