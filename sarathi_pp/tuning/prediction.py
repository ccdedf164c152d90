"""The demand of a workload on a pipeline, and the prediction of its time there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.workload import Workload

# Enough to fill the pipeline many times. Ten thousand would take a minute.
_MOST_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class Demand:
    """The sums over a workload that a prediction needs.

    Attributes:
        decodes: without the first token of each output, which comes with its prompt and is not a decode.
        pair_tokens: sum of x*x/2 over the prompts.
        key_tokens: sum over the decodes of the tokens that each reads.
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
        for prompt, output in workload.lengths():
            prompt_tokens += prompt
            decodes += output - 1
            pair_tokens += prompt * prompt / 2
            key_tokens += (output - 1) * (prompt + output / 2)
        return cls(workload.num_requests, prompt_tokens, decodes, pair_tokens, key_tokens)

    def decodes_at_once(self, run: ResolvedRun) -> float:
        """Return the decodes per microbatch if all requests run that max_num_seqs and the KV cache allow."""
        fitting = run.num_pages * run.page_size / self.mean_tokens
        return max(1.0, min(run.max_num_seqs, self.num_requests, fitting) / run.num_stages)

    @property
    def mean_tokens(self) -> float:
        """KV tokens of an average request. Half of its output counts, because outputs grow."""
        return (self.prompt_tokens + self.decodes / 2) / self.num_requests

    def load(self, prefill: float, decodes: float) -> Load:
        """Return the load of a microbatch with these prefill tokens and decodes, at their average depth."""
        attention = self.pair_tokens / self.prompt_tokens * prefill
        context = self.key_tokens / self.decodes * decodes if self.decodes else 0.0
        return Load(round(prefill), attention, round(decodes), round(context))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected result of a run.

    Attributes:
        wall_s: time of the whole workload.
        microbatches: number for the whole workload.
    """

    wall_s: float
    bubble_ratio: float
    microbatches: int
    total_tokens_per_s: float


def predict(profile: Profile, workload: Workload, run: ResolvedRun) -> Prediction:
    """Simulate the run's policy on the profile's stages.

    Only the first requests of a long workload are simulated. The others are assumed to be like them.

    Raises:
        ConfigError: the workload has requests that do not fit.
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
