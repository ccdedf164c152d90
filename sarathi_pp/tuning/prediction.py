"""The work of a workload, and the prediction of the time that it takes on a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.workload import Workload

# Most requests that are simulated. They fill the pipeline many times, and ten thousand would take a minute.
_MOST_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of a workload, as sums over its requests. Tokens with which an earlier prompt began too are left out.

    Attributes:
        prompt_tokens: prompt tokens to compute.
        decodes: number of decodes. The first token of an output comes with its prompt, and is not a decode.
        pair_tokens: pairs of tokens that the attention of prompts computes: the sum of x*x/2 over prompts of x tokens,
            less the pairs within the tokens that are left out.
        key_tokens: tokens whose keys and values the decodes read, summed over all decodes.
    """

    num_requests: int
    prompt_tokens: int
    decodes: int
    pair_tokens: float
    key_tokens: float

    @classmethod
    def of(cls, workload: Workload) -> Demand:
        prompt_tokens = decodes = 0
        pair_tokens = key_tokens = 0.0
        for (prompt, output), known in zip(workload.lengths(), workload.repeated_tokens(), strict=True):
            prompt_tokens += prompt - known
            decodes += output - 1
            pair_tokens += (prompt * prompt - known * known) / 2
            key_tokens += (output - 1) * (prompt + output / 2)
        return cls(workload.num_requests, prompt_tokens, decodes, pair_tokens, key_tokens)

    def decodes_at_once(self, run: ResolvedRun) -> float:
        """Return the mean number of decodes per microbatch, if the most requests run that the limits allow.

        The limits are max_num_seqs and the KV cache.
        """
        fitting = run.num_pages * run.page_size / self.mean_tokens
        return max(1.0, min(run.max_num_seqs, self.num_requests, fitting) / run.num_stages)

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens that a request adds to the KV cache. Half of its output counts, because it grows."""
        return (self.prompt_tokens + self.decodes / 2) / self.num_requests

    def load(self, prefill: float, decodes: float) -> Load:
        """Return the load of a microbatch with these numbers of prefill tokens and decodes.

        Their contexts (earlier tokens) have the mean length of the workload.
        """
        attention = self.pair_tokens / self.prompt_tokens * prefill
        context = self.key_tokens / self.decodes * decodes if self.decodes else 0.0
        return Load(round(prefill), attention, round(decodes), round(context))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected result of a run.

    Attributes:
        wall_s: seconds of the whole workload.
        bubble_ratio: mean share of the time in which a stage computes nothing, from 0 to 1.
        microbatches: number of microbatches for the whole workload.
    """

    wall_s: float
    bubble_ratio: float
    microbatches: int
    total_tokens_per_s: float


def predict(profile: Profile, workload: Workload, run: ResolvedRun) -> Prediction:
    """Predict the result of a run: simulate its policy on the stages of a profile.

    Only the first 300 requests of a long workload are simulated. The others are assumed to be like them. Without shared
    prefixes, the simulation has no prefix cache, since it would find hardly anything.

    Raises:
        ConfigError: the workload has requests that do not fit into the KV cache.
    """
    sample = replace(workload, num_requests=min(workload.num_requests, _MOST_REQUESTS))
    experiment = Experiment(
        profile=replace(profile, pages=run.num_pages, page_size=run.page_size),
        workload=sample,
        policy=parse_policy(run.policy),
        chunk_size=run.chunk_size,
        max_num_seqs=run.max_num_seqs,
        max_model_len=max(run.max_model_len, sample.max_tokens),
        inflight=run.inflight,
        head="auto" if run.moves_head else "last",
        prefix_cache=run.prefix_cache if sample.shares_prefixes else "off",
    )
    report = report_of(experiment)
    longer = _tokens(workload) / _tokens(sample)
    return Prediction(
        wall_s=longer * report["wall_s"],
        bubble_ratio=report["bubble_ratio"],
        microbatches=round(longer * report["microbatches"]),
        total_tokens_per_s=report["total_tokens_per_s"],
    )


def _tokens(workload: Workload) -> int:
    return sum(map(sum, workload.lengths()))
